// Light or dark: what the system asks for, until the button is pressed; then what it says, kept in the browser.
export function installTheme(button) {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)"), key = "phsa-theme";
  // A browser may keep nothing, as for a file.
  const kept = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const keep = name => { try { localStorage.setItem(key, name); } catch { /* it holds for this page */ } };
  const paint = dark => {
    root.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", dark);
  };
  paint(kept() === null ? system.matches : kept() === "dark");
  system.addEventListener("change", () => { if (kept() === null) paint(system.matches); });
  button.addEventListener("click", () => {
    paint(root.dataset.theme !== "dark");
    keep(root.dataset.theme);
  });
}
