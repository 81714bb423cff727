"use strict";
(() => {
  const bar = document.querySelector(".filters");
  if (!bar) return;
  document.documentElement.classList.add("scripted");
  const selects = [...bar.querySelectorAll("select")];
  const cards = [...document.querySelectorAll("article")];
  const output = bar.querySelector("output");
  const apply = () => {
    let shown = 0;
    for (const card of cards) {
      card.hidden = !selects.every((select) => select.value === "" || card.dataset[select.name] === select.value);
      if (!card.hidden) shown += 1;
    }
    output.textContent = shown + " of " + cards.length + " shown";
  };
  for (const select of selects) select.addEventListener("change", apply);
  apply();
})();
