// Keeps a page current: when its feed reports a change, the page is fetched again, and the
// regions that differ are replaced. Everything that is shown is rendered on the server.

/** How long changes are collected before the page is fetched again. */
const COLLECT_MS = 150;
/** How long to wait before a lost feed is opened again: at first, and at most. */
const RETRY_MS = [500, 10_000];
/** The status is spoken at most this often. */
const SPEAK_MS = 5_000;

const place = document.documentElement.dataset.live;
const poll = Number(document.documentElement.dataset.poll || 0);
const panel = document.querySelector("#live");
const words = document.querySelector("#live-words");
const spoken = document.querySelector("#live-spoken");
const button = document.querySelector("#live-pause");

let paused = false;
let stale = false;
let asking = false;
let timer = 0;
let retry = RETRY_MS[0];
let spokenAt = 0;
/** @type {EventSource | null} */
let feed = null;

function show(/** @type {string} */ text) {
  if (words.textContent !== text) words.textContent = text;
}

function speak(/** @type {string} */ text) {
  const now = Date.now();
  if (now - spokenAt < SPEAK_MS) return;
  spokenAt = now;
  spoken.textContent = text;
}

/** The text of a row, without ages, which change by themselves. */
function told(/** @type {Element} */ row) {
  const cells = [...row.querySelectorAll("td, th")];
  return cells.filter((each) => !each.querySelector("time")).map((each) => each.textContent).join();
}

const CHOICES = "[type=radio], [type=checkbox]";

/** How an element is found again in a new region. */
function selector(/** @type {Element} */ each) {
  if (each.id) return `#${CSS.escape(each.id)}`;
  if (each.matches("a[href]")) return `a[href="${CSS.escape(each.getAttribute("href"))}"]`;
  const value = each.matches(CHOICES) ? `[value="${CSS.escape(each.value)}"]` : "";
  return `[name="${CSS.escape(each.getAttribute("name") ?? "")}"]${value}`;
}

/** What is chosen, and where it is found again. */
function choices(/** @type {Element} */ region) {
  return [...region.querySelectorAll(CHOICES)].map((each) => [selector(each), each.checked]);
}

/** A region as the server sent it: without what the reader has opened, and without marks. */
function sent(/** @type {Element} */ region) {
  const copy = region.cloneNode(true);
  for (const each of copy.querySelectorAll("[open], .changed")) {
    each.removeAttribute("open");
    each.classList.remove("changed");
    if (each.getAttribute("class") === "") each.removeAttribute("class");
  }
  return copy.outerHTML;
}

/** Replace the regions that differ, and keep what the reader has opened and chosen. */
function exchange(/** @type {Document} */ fresh) {
  let changes = 0;
  for (const region of document.querySelectorAll("[data-region]")) {
    const name = region.getAttribute("data-region");
    const next = fresh.querySelector(`[data-region="${CSS.escape(name)}"]`);
    if (next === null || sent(next) === sent(region)) continue;
    const focused = region.contains(document.activeElement) ? document.activeElement : null;
    if (focused?.matches(`select, textarea, input:not(${CHOICES})`)) {
      stale = true;
      continue;
    }
    const open = new Set([...region.querySelectorAll("details[open][id]")].map((each) => each.id));
    const before = new Map([...region.querySelectorAll("[data-row]")].map(
      (row) => [row.getAttribute("data-row"), told(row)]));
    const chosen = choices(region);
    const place = focused && selector(focused);
    region.replaceWith(next);
    for (const [where, checked] of chosen) {
      const field = next.querySelector(where);
      if (field) field.checked = checked;
    }
    if (place) next.querySelector(place)?.focus({ preventScroll: true });
    for (const each of next.querySelectorAll("details[id]")) {
      if (open.has(each.id)) each.setAttribute("open", "");
    }
    for (const row of next.querySelectorAll("[data-row]")) {
      if (before.get(row.getAttribute("data-row")) !== told(row)) row.classList.add("changed");
    }
    changes += 1;
  }
  return changes;
}

/** Whether changes are reported by a feed, or polled for. */
function isFollowed() {
  return !place || feed?.readyState === EventSource.OPEN;
}

function renew(/** @type {Document} */ fresh) {
  if (exchange(fresh) > 0) speak("The page was updated.");
  document.dispatchEvent(new CustomEvent("refreshed", { detail: fresh }));
}

async function refresh() {
  timer = 0;
  if (paused || asking || document.hidden) {
    stale = true;
    return;
  }
  asking = true;
  stale = false;
  try {
    const asked = location.href;
    const answer = await fetch(asked, { headers: { accept: "text/html" } });
    if (answer.redirected && !answer.url.startsWith(location.origin + location.pathname)) {
      location.reload();
      return;
    }
    if (answer.ok) {
      const text = await answer.text();
      if (!paused && isFollowed()) show("Live");
      // Meanwhile the reader may have gone to another moment, whose address the page has now.
      if (location.href === asked) renew(new DOMParser().parseFromString(text, "text/html"));
      else stale = true;
    } else if (answer.status === 404) {
      paused = true;
      button.hidden = true;
      stop();
      show("Removed");
    } else {
      if (!paused) show("Behind");
      if (place) later(RETRY_MS[1]);
    }
  } catch {
    // A feed that is opened again fetches the page by itself.
    stale = isFollowed();
    if (!paused) show("Reconnecting…");
  } finally {
    asking = false;
  }
  if (stale) later(COLLECT_MS * 4);
}

function later(/** @type {number} */ milliseconds) {
  if (timer === 0) timer = setTimeout(refresh, milliseconds);
}

function follow() {
  feed?.close();
  feed = new EventSource(place);
  feed.onopen = () => {
    retry = RETRY_MS[0];
    show("Live");
    later(0);
  };
  feed.onerror = () => {
    feed.close();
    feed = null;
    show("Reconnecting…");
    // The page, not its feed, tells a reader who is no longer signed in.
    setTimeout(() => { if (!paused && !document.hidden && feed === null) { follow(); later(0); } },
      retry * (0.5 + Math.random() / 2));
    retry = Math.min(retry * 2, RETRY_MS[1]);
  };
  feed.addEventListener("change", () => later(COLLECT_MS));
}

function start() {
  if (paused || document.hidden) return;
  if (place && feed === null) follow();
  else if (poll) { show("Live"); later(0); }
}

function stop() {
  feed?.close();
  feed = null;
}

if (panel && (place || poll)) {
  panel.hidden = false;
  show("Connecting…");
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Resume" : "Pause";
    if (paused) { stop(); show("Paused"); } else start();
  });
  document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else start(); });
  if (poll) setInterval(() => { if (!paused && !document.hidden) later(0); }, poll);
  start();
}
