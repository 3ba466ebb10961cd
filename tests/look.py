"""`make look`: reports in a headless browser, as people see them. No part of `make test`, which has no browser."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

from basecap.report import write_report
from basecap.report.bundle import source_of
from tests.report.synthetic import write_study
from tests.report.test_task_report import task_study

#: Pixels of CSS between the margins of A4.
PAPER = 703
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: What stands before every script of the page: it hears whatever goes wrong.
BEFORE = """<script>
window.heard = [];
for (const kind of ["log", "info", "warn", "error"])
  console[kind] = (...said) => heard.push(`console: ${said.join(" ")}`);
addEventListener("error", (event) => heard.push(`error: ${event.message}`));
addEventListener("unhandledrejection", (event) => heard.push(`promise: ${event.reason}`));
document.addEventListener("securitypolicyviolation", (event) => heard.push(`request: ${event.blockedURI}`));
</script>"""
#: What uses the page: the legend, a mark under the pointer, a table's head; each finding is [what, whether].
AFTER = """<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const printed = matchMedia("(width: 703px)").matches;
// The size of letters in points, of those in a chart after it was shrunk.
const points = (one) => .75 * parseFloat(getComputedStyle(one).fontSize)
  * (one.ownerSVGElement ? Math.hypot(one.getScreenCTM().a, one.getScreenCTM().b) : 1);
const faded = () => document.querySelectorAll('.chart path[opacity="0.08"]').length;
async function use() {
  const found = [];
  if (printed) dispatchEvent(new Event("beforeprint"));
  else document.querySelectorAll("details").forEach((part) => { part.open = true; });
  await wait(2500);
  const charts = [...document.querySelectorAll(".chart")].filter((one) => one.checkVisibility());
  const drawn = charts.length > 2 && charts.every((one) => one.querySelector("svg path"));
  found.push([`${charts.length} charts are drawn`, drawn]);
  found.push(["nothing is fetched", performance.getEntriesByType("resource").length === 0]);
  const wide = document.documentElement.scrollWidth;
  found.push([`the page is no wider than the screen (${wide} of ${innerWidth})`, wide <= innerWidth]);
  const bare = [...document.querySelectorAll("button, summary, a")].filter((one) => one.tabIndex < 0);
  found.push(["buttons, links and folds can be reached with the keyboard", bare.length === 0]);
  const cut = charts.flatMap((one) => {
    const frame = one.querySelector("svg").getBoundingClientRect();
    return [...one.querySelectorAll("svg text")].filter((text) => {
      const box = text.getBoundingClientRect();
      return text.getAttribute("opacity") !== "0" && (box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).map((text) => `${one.dataset.name}: ${text.textContent}`);
  });
  found.push([`no chart cuts its words off (${cut.slice(0, 3).join("; ")})`, cut.length === 0]);
  const tables = [...document.querySelectorAll(".wide > table")].map((table) => table.parentElement);
  const begin = (one) => one.textContent.trim().slice(0, 20);
  const hidden = tables.filter((part) => part.scrollWidth > part.clientWidth + 1).map(begin);
  if (innerWidth < 600 || printed)
    found.push([`no table hides columns (${hidden.slice(0, 3).join("; ")})`, hidden.length === 0]);
  if (printed) {
    const seen = [...document.querySelectorAll("main :not(script)")].filter((one) => one.checkVisibility());
    const small = seen.filter((one) => [...one.childNodes].some((part) => part.nodeType === 3 && part.data.trim())
      && points(one) < 7.99).map(begin);
    found.push([`letters have 8 points at least (${small.slice(0, 3).join("; ")})`, small.length === 0]);
    parent.postMessage(JSON.stringify({found, heard}), "*");
    return;
  }
  const button = document.querySelector(".legend button[data-name]");
  if (button) {
    button.click(); await wait(600);
    found.push(["the legend fades what is not picked", faded() > 0 && button.ariaPressed === "true"]);
    document.querySelector(".legend .everything").click(); await wait(600);
    found.push(["and brings it back", faded() === 0]);
  }
  const place = document.querySelector('[data-name="gaps"]');
  if (place) {
    const mark = [...place.querySelectorAll(".mark-symbol path")].at(-1);
    const {x, y, width, height} = mark.getBoundingClientRect();
    for (const kind of ["pointermove", "mousemove", "pointerover", "mouseover"])
      mark.dispatchEvent(new PointerEvent(kind, {bubbles: true, clientX: x + width / 2, clientY: y + height / 2}));
    await wait(400);
    const said = document.querySelector("#vg-tooltip-element")?.innerText ?? "";
    found.push(["a mark under the pointer says gap and interval", /gap/.test(said) && /interval/.test(said)]);
  }
  const table = document.querySelector("table.sortable");
  if (table) {
    const head = table.tHead.rows[0].cells[0];
    const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
    head.querySelector("button").click(); const up = names();
    found.push(["a table sorts", head.ariaSort === "ascending" && up.join() === [...up].sort().join()]);
    head.querySelector("button").click();
    found.push(["and the other way", head.ariaSort === "descending" && names().join() === up.reverse().join()]);
  }
  parent.postMessage(JSON.stringify({found, heard}), "*");
}
use().catch((error) => parent.postMessage(JSON.stringify({found: [], heard: [`look: ${error}`]}), "*"));
</script>"""


#: A frame as wide as asked, as a browser's window has a least width; it writes down what the page in it found.
FRAME = """<!doctype html><body style="margin: 0">
<iframe src="page.html" width="{width}" height="900" style="border: 0"></iframe>
<script>addEventListener("message", (event) => {{ const out = document.createElement("pre"); out.id = "look";
  out.textContent = event.data; document.body.append(out); }});</script></body>"""


def look(browser: str, page: Path, width: int, dark: bool) -> list[str]:
    """Use a page at a width in light or dark, or look at it as at `PAPER` it is printed; returns what is wrong."""
    text = page.read_text(encoding="utf-8")
    if width == PAPER:
        text = text.replace("@media screen", "@media speech").replace("@media print", "@media screen")
    own = " ".join(source_of(re.sub("</?script>", "", script)) for script in (BEFORE, AFTER))
    text = text.replace("script-src ", f"script-src {own} ", 1).replace("<style>", f"{BEFORE}<style>", 1)
    head, end, tail = text.rpartition("</body>")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(f"{head}{AFTER}{end}{tail}", encoding="utf-8")
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(width=width), encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
        options += [f"--user-data-dir={folder}/profile", "--window-size=1400,1000", "--dump-dom"]
        options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        done = subprocess.run([browser, *options, frame.as_uri()], capture_output=True, text=True, timeout=180)
    answer = re.search(r'<pre id="look">(.*?)</pre>', done.stdout, re.DOTALL)
    if answer is None:
        return [f"the page gave no answer: {done.stderr[-300:]}"]
    result = json.loads(unescape(answer.group(1)))
    return [what for what, right in result["found"] if not right] + result["heard"]


def main() -> int:
    """Look at a report of each kind at two widths, light and dark; returns the exit code."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print("look: skipped, as no Chromium is installed.")
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        text, mixed, tasks, joined = (Path(folder) / name for name in ("text", "mixed", "tasks", "joined"))
        write_study(text, documents=60, seeds=(0, 1, 2), more_evaluations=True)
        published = {"source": "a paper with a long name", "values": {"mamba-2": [[2.83619, 2.30881], [2.75, 2.22]]}}
        write_study(mixed, documents=60, ood=[], figure={"kind": "losses", "published": published})
        task_study(tasks)
        for place, studies in ((text, [text]), (mixed, [mixed]), (tasks, [tasks]), (joined, [text, mixed])):
            page = write_report(studies, place).page
            for width, dark in ((1280, False), (1280, True), (380, False), (380, True), (PAPER, False)):
                said = look(browser, page, width, dark)
                wrong += len(said)
                form = "printed" if width == PAPER else f"at {width} px"
                name = f"{place.name} {form}, {'dark' if dark else 'light'}"
                print(f"{name}: {'; '.join(said) or 'as it should be'}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
