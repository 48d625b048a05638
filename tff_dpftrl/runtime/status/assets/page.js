// Asks for the page again every two seconds, and shows the parts that have changed.

const PAUSE = 2000; // Milliseconds.
const PATIENCE = 10000;

async function refresh() {
  try {
    const signal = AbortSignal.timeout(PATIENCE);
    const response = await fetch(location.href, { cache: "no-store", signal });
    if (!response.ok) throw new Error(`status ${response.status}`);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const focused = document.activeElement?.id;
    for (const part of page.querySelectorAll("body > [id], main > [id]")) {
      const shown = document.getElementById(part.id);
      if (!shown.isEqualNode(part)) shown.replaceChildren(...part.childNodes);
    }
    if (focused) document.getElementById(focused)?.focus();
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
  }
  setTimeout(refresh, document.hidden ? 5 * PAUSE : PAUSE);
}
setTimeout(refresh, PAUSE);
