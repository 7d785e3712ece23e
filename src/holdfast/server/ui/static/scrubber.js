// Moves through a history: the page of each moment is fetched, and its regions are shown.
// Without this module the same form is sent with its button.

/** How long each moment is shown while the history is played, at speed 1. */
const STEP_MS = 800;

const form = document.querySelector("form[data-scrubber]");
const range = form?.querySelector("input[type=range]");
const play = form?.querySelector("[data-play]");

let asked = 0;
let timer = 0;

function region(/** @type {Document} */ page, /** @type {string} */ name) {
  return page.querySelector(`[data-region="${CSS.escape(name)}"]`);
}

/** Where the moment of the form is shown. */
function place() {
  const found = new URL(form.action);
  const wanted = new URLSearchParams(new FormData(form));
  // The newest is now, and stays so when more is written.
  if (range.value === range.max && (!wanted.has("until") || "isNewest" in form.dataset)) {
    wanted.delete("at");
    wanted.delete("until");
  }
  for (const [name, value] of [...wanted]) if (value === "") wanted.delete(name);
  found.search = wanted.toString();
  return found;
}

function tell(/** @type {Document} */ page) {
  const fresh = page.querySelector("form[data-scrubber] input[type=range]");
  if (fresh) range.setAttribute("aria-valuetext", fresh.getAttribute("aria-valuetext"));
}

async function show() {
  const mine = ++asked;
  const wanted = place();
  const answer = await fetch(wanted, { headers: { accept: "text/html" } });
  if (!answer.ok || mine !== asked) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (mine !== asked) return;
  for (const name of form.dataset.scrubber.split(" ")) {
    const [here, next] = [region(document, name), region(page, name)];
    const open = [...here.querySelectorAll("details[open][id]")].map((each) => each.id);
    for (const id of open) next.querySelector(`#${CSS.escape(id)}`)?.setAttribute("open", "");
    here.replaceWith(next);
  }
  tell(page);
  history.replaceState(null, "", wanted);
}

function stop() {
  clearTimeout(timer);
  timer = 0;
  play.textContent = "Play";
}

async function step() {
  range.value = String(Number(range.value) + 1);
  await show();
  if (timer === 0) return;
  if (range.value === range.max) stop();
  else timer = setTimeout(step, STEP_MS / Number(form.querySelector("[data-speed]").value));
}

function toggle() {
  if (timer !== 0) { stop(); return; }
  if (range.value === range.max) range.value = range.min;
  play.textContent = "Stop";
  timer = setTimeout(step, 0);
}

if (form && range) {
  range.addEventListener("input", () => { if (timer !== 0) stop(); show(); });
  range.addEventListener("keydown", (event) => {
    if (event.key === " ") { event.preventDefault(); toggle(); }
  });
  play.addEventListener("click", toggle);
  form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
  document.addEventListener("click", (event) => {
    const mark = event.target.closest("[data-position]");
    if (mark) { range.value = mark.dataset.position; show(); }
  });
  // The history has grown: a reader at the newest moment stays there.
  document.addEventListener("refreshed", (event) => {
    const fresh = event.detail.querySelector("form[data-scrubber]");
    if (!fresh || "isNewest" in form.dataset !== "isNewest" in fresh.dataset) return;
    const next = fresh.querySelector("input[type=range]");
    const isNow = range.value === range.max && timer === 0;
    for (const name of ["min", "max"]) range[name] = next[name];
    if (isNow) { range.value = next.max; tell(event.detail); }
    form.querySelector("[data-last]").textContent = fresh.querySelector("[data-last]").textContent;
    const until = form.querySelector("[name=until]");
    if (until) until.value = fresh.querySelector("[name=until]").value;
  });
}
