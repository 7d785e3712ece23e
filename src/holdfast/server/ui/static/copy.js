// Buttons that copy the text of the element that they name.
document.documentElement.classList.add("scripted");
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  const before = [...button.childNodes];
  button.replaceChildren("Copied");
  setTimeout(() => button.replaceChildren(...before), 1500);
});
