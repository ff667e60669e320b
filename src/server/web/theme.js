// The colours: system, light or dark. Runs before the page is drawn, so it is no module.
(() => {
  const KEPT = 'freshet.theme';
  const CHOICES = ['system', 'light', 'dark'];
  const dark = matchMedia('(prefers-color-scheme: dark)');
  let choice = 'system';
  try {
    choice = CHOICES.find((c) => c === localStorage.getItem(KEPT)) ?? 'system';
  } catch {
    // Storage may be blocked.
  }
  const apply = () => {
    const shown = choice === 'system' ? (dark.matches ? 'dark' : 'light') : choice;
    document.documentElement.dataset.theme = shown;
    document.querySelector('meta[name="theme-color"]').content = shown === 'dark' ? '#14181c' : '#ffffff';
    document.dispatchEvent(new Event('themechange'));
  };
  dark.addEventListener('change', apply);
  apply();
  window.freshetTheme = {
    get choice() {
      return choice;
    },
    next() {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEPT, choice);
      } catch {
        // Then it lasts as long as the page.
      }
      apply();
      return choice;
    },
  };
})();
