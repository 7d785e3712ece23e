// Moves through the history of the shared state: the page of each sequence is asked for, and its
// region is shown. Without this module the same form is sent with its button.

const form = document.querySelector("form[data-scrubber]");
const range = form?.querySelector("input[type=range]");

let asked = 0;

async function show() {
  const mine = ++asked;
  const place = new URL(form.action);
  const wanted = new URLSearchParams(new FormData(form));
  // The newest is now, and stays so when more is written.
  if (range.value === range.max) wanted.delete("at");
  place.search = wanted.toString();
  const answer = await fetch(place, { headers: { accept: "text/html" } });
  if (!answer.ok || mine !== asked) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const next = fresh.querySelector('[data-region="keys"]');
  document.querySelector('[data-region="keys"]').replaceWith(next);
  range.setAttribute("aria-valuetext", fresh.querySelector("form[data-scrubber] input[type=range]")
    .getAttribute("aria-valuetext"));
  history.replaceState(null, "", place);
}

if (form && range) {
  range.addEventListener("input", show);
  form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
}
