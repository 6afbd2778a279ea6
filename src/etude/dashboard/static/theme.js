// Before the page is drawn: dark or light, as chosen here or in the system.
"use strict";
(() => {
  let kept = null;
  try {
    kept = localStorage.getItem("etude-theme");
  } catch {
    // storage is not allowed: the system decides
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = kept ?? (system.matches ? "dark" : "light");
  };
  apply();
  system.addEventListener("change", () => {
    apply();
    dispatchEvent(new Event("theme"));
  });
  globalThis.switchTheme = () => {
    kept = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("etude-theme", kept);
    } catch {
      // only until the page is closed
    }
    apply();
    dispatchEvent(new Event("theme"));
  };
})();
