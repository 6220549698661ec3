// Search, keys, and the current section in the contents. Pages can be read without this script.

const menu = document.getElementById("show-contents");
const contents = document.querySelector("nav div");
const pages = [...document.querySelectorAll("nav p a")];
const sections = [...document.querySelectorAll("nav ol a")];
const headings = sections.map((link) => document.getElementById(link.hash.slice(1)));

// The number of this page. The address of page 0, the index, may be that of its folder.
const here = Math.max(0, pages.findIndex((link) => link.pathname === location.pathname));
pages[here].setAttribute("aria-current", "page");

// Return the number of the section at the top of the window, or -1.
function currentSection() {
  return headings.findLastIndex((heading) => heading.getBoundingClientRect().top < 100);
}

let marked = -1;
function markCurrentSection() {
  const current = currentSection();
  if (current === marked) return;
  sections[marked]?.removeAttribute("aria-current");
  sections[current]?.setAttribute("aria-current", "true");
  sections[current]?.scrollIntoView({ block: "nearest" });
  marked = current;
}
addEventListener("scroll", markCurrentSection);
markCurrentSection();

// Search. The text of all pages is in search.js, which is loaded when it is first needed.
const box = document.createElement("input");
const results = document.createElement("ol");
box.type = "search";
box.placeholder = "Search all pages";
box.ariaLabel = box.placeholder;
contents.prepend(box, results);

function loadText() {
  const script = document.createElement("script");
  script.src = "search.js"; // defines BOOK
  script.onload = search;
  document.head.append(script);
}
box.addEventListener("focus", loadText, { once: true });

function search() {
  const words = box.value.toLowerCase().split(" ").filter(Boolean);
  results.replaceChildren();
  if (words.length === 0 || typeof BOOK === "undefined") return;
  for (const [address, row, text] of BOOK) {
    const lower = text.toLowerCase();
    if (!words.every((word) => lower.includes(word))) continue;
    const start = Math.max(0, lower.indexOf(words[0]) - 30);
    const link = document.createElement("a");
    link.href = `${address}#L${row}`;
    link.textContent = `${address.slice(0, -5)}, ${row}: ${text.slice(start, start + 90)}`;
    const item = document.createElement("li");
    item.append(link);
    results.append(item);
    if (results.children.length === 200) break;
  }
}
box.addEventListener("input", search);

// In a narrow window the contents lie over the page. They close when a link is chosen.
contents.addEventListener("click", (event) => {
  if (event.target.closest("a")) menu.checked = false;
});

// Keys.
const help = document.createElement("p");
help.textContent =
  "Keys: n and p lead to the next and the previous section, N and P to the next and the previous " +
  "page, / to the search.";
contents.append(help);

addEventListener("keydown", (event) => {
  if (event.target === box || event.ctrlKey || event.altKey || event.metaKey) return;
  const current = currentSection();
  const links = {
    n: sections[current + 1],
    p: sections[current - 1],
    N: pages[here + 1],
    P: pages[here - 1],
  };
  links[event.key]?.click();
  if (event.key === "/") {
    event.preventDefault();
    menu.checked = true;
    box.focus();
  }
});
