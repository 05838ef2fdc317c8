// Names for screen readers, and keyboard access to wide code and tables.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "All pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const wide of document.querySelectorAll("pre, .content table")) {
    if (wide.scrollWidth > wide.clientWidth || wide.scrollHeight > wide.clientHeight) {
      wide.tabIndex = 0;
    }
  }
  if (!document.querySelector("h1")) {
    const title = document.createElement("h1");
    title.textContent = "Search"; // the only page of Sphinx without a title
    document.querySelector("article, [role=main]")?.prepend(title);
  }
});
