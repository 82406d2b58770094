"""The documentation's web site in Debian's chromium, from a disk and without a network."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM, MKDOCS = Path("/usr/bin/chromium"), Path(sys.prefix, "site/bin/mkdocs")
pytestmark = pytest.mark.slow

# Contrast of each text that is seen, after WCAG 2: [ratio, words] where it is below 4.5 (3 for large text)
FAINT = """() => {
  const parts = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { if (!e) return [255, 255, 255]; const c = parts(getComputedStyle(e).backgroundColor);
    return c[3] === 1 ? c.slice(0, 3) : over(c, ground(e.parentElement)); };
  const found = [];
  for (const e of document.querySelectorAll('.md-content *, .md-header *, .md-nav *')) {
    const words = [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
    const style = getComputedStyle(e);
    const seen = e.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!words || !seen || e.closest('.headerlink')) continue;
    const back = ground(e), fore = over(parts(style.color), back);
    const [low, high] = [light(fore), light(back)].sort((a, b) => a - b), ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push([ratio.toFixed(2), e.className, words.slice(0, 30)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("the site's packages are not installed: make site")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([MKDOCS, "build", "--strict", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip("there is no /usr/bin/chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(r"""(?:<(?:script|img|link)\b[^>]*(?:src|href)=["']?|url\(["']?)((?:https?:)?//[^"'\s>)]+)""")
    for page in [*site.glob("*.html"), *site.rglob("*.css")]:
        assert loads.findall(page.read_text()) == [], page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_on_a_phone_is_quiet_whole_and_legible(site, browser, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    names = sorted({path.name for path in site.glob("*.html")} - {"404.html"})  # whose links begin at the host
    assert len(names) > 17
    for name in names:
        page.goto((site / name).as_uri())
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, name
        assert page.evaluate(FAINT) == [], name
        for link in page.eval_on_selector_all("a[href]", "all => all.map(a => a.href)"):
            if link.startswith("file:"):
                path, _, anchor = link.removeprefix("file://").partition("#")
                there = Path(path).read_text()
                assert not anchor or re.search(rf'id="?{re.escape(unquote(anchor))}["\s>]', there), (name, link)
    assert said == [] and all(url.startswith(("file:", "blob:", "data:")) for url in asked)
    context.close()


def test_the_search_finds_an_option_from_a_disk(site, browser):
    page = browser.new_page(offline=True)
    page.goto((site / "index.html").as_uri())
    page.get_by_placeholder("Search").first.fill("ema_decay")
    page.locator(".md-search-result__item a").first.wait_for(timeout=20_000)
    assert "options.html" in " ".join(
        page.eval_on_selector_all(".md-search-result__item a", "all => all.map(a => a.href)")
    )
    page.close()
