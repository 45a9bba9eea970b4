// Light or dark: what the system asks for, until the button is pressed.
export function installTheme(button) {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const paint = dark => {
    root.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", dark);
  };
  paint(system.matches);
  system.addEventListener("change", () => paint(system.matches));
  button.addEventListener("click", () => paint(root.dataset.theme !== "dark"));
}
