// Sets light or dark before the first paint; loaded as a plain script at the top of each page.
// Without a choice of the user's, the browser's preference holds.
"use strict";
(() => {
  const NAME = "marsray.theme";
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

  const stored = () => {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null; // storage is turned off: the choice lasts as long as the page
    }
  };
  const show = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  show(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    if (!button) return;
    const name = () => button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    name();
    prefersDark.addEventListener("change", name);
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      show(theme);
      name();
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // as above
      }
    });
  });
})();
