// How far a prompt has been prefilled, and the time that is left by the speed of its latest part.
import { make, number } from "./explorer.js";

const LATEST = 4;  // steps that the speed is taken from
const RATHER = 2;  // seconds without news after which nothing is foreseen

function formatLeft(seconds) {
  if (seconds < 1) return "less than 1 s left";
  if (seconds < 90) return Math.ceil(seconds) + " s left";
  return Math.ceil(seconds / 60) + " min left";
}

// An element with a bar and a line; take({done, total}) whenever something is known, draw() whenever time has passed.
export function createProgress() {
  const element = make("div", "progress"), bar = make("progress"), line = make("span", "soft");
  const begun = performance.now();
  const steps = [];  // [seconds, tokens]
  let total = 0;
  bar.setAttribute("aria-label", "Prefill");
  element.append(bar, line);
  const since = () => (performance.now() - begun) / 1000;

  function draw() {
    if (total === 0) {
      line.textContent = "waiting for the prefill, " + since().toFixed(1) + " s";
      return;
    }
    const [first, last] = [steps[0], steps.at(-1)], seconds = last[0] - first[0];
    const speed = seconds > 0 ? (last[1] - first[1]) / seconds : 0;  // several may be told in one moment
    let text = "prefill: " + number(last[1]) + " of " + number(total) + " tokens";
    bar.max = total;
    bar.value = last[1];
    if (speed > 0) {
      // A step is told when it has ended; what the one under way has done is guessed from the last.
      const stepTime = seconds / (steps.length - 1), now = since() - last[0];
      const guessed = Math.min(now, stepTime) * speed, left = (total - last[1] - guessed) / speed;
      bar.value = Math.min(total, last[1] + guessed);
      if (now < stepTime + Math.max(RATHER, stepTime)) text += ", " + formatLeft(Math.max(0, left));
    } else {
      text += ", " + since().toFixed(1) + " s";
    }
    line.textContent = text;
  }
  function take(prefill) {
    total = prefill.total;
    steps.push([since(), prefill.done]);
    if (steps.length > LATEST) steps.shift();
    draw();
  }
  draw();
  return { element, take, draw };
}
