"""Collect English text from Debian packages, for training the pocket models and for the slice that the examples use.

    apt-get update
    python examples/models/collect_text.py --out text.jsonl.xz
    python examples/models/collect_text.py --out examples/text/documents.jsonl.xz --slice 3000000

Packages are downloaded with apt-get and unpacked, never installed. One JSON object a line: source, work, text. A work (a page of a manual)
that is longer than 60,000 characters is cut into several texts. Works are held out of training by a digest of their name: the models
train on the others, and the slice is drawn from the held-out ones alone.
"""

import argparse
import gzip
import hashlib
import json
import lzma
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = {
    "python": "python3.11-doc",
    "postgresql": "postgresql-doc-15",
    "django": "python-django-doc",
    "apache": "apache2-doc",
    "linux": "linux-doc-6.1",
    "perl": "perl-doc",
    "man": "manpages",
    "man_dev": "manpages-dev",
}
SLICE_SOURCES = ("python", "postgresql", "apache", "django")
SHORTEST, LONGEST = 1_200, 60_000


def is_held_out(work: str) -> bool:
    """Tell whether a work is kept from training: one in ten, by the digest of its name."""
    return int(hashlib.sha256(f"held out: {work}".encode()).hexdigest(), 16) % 10 == 0


class _Page(HTMLParser):
    """The running text of a page, without navigation and scripts."""

    SKIP = ("script", "style", "nav", "header", "footer", "head", "select", "form")
    SKIP_CLASS = re.compile(
        r"sphinxsidebar|related|navheader|navfooter|\btoc|headerlink|footer|langs|quickview|\bnav\b|\bhd\b|\bpath\b|\bmenu\b"
    )
    VOID = ("br", "img", "hr", "meta", "link", "input", "col", "wbr", "area", "base")
    BREAK = ("p", "div", "h1", "h2", "h3", "h4", "li", "dt", "dd", "tr", "pre", "br", "table", "section")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.open: list[bool] = []  # for each open element, whether it is skipped

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in self.BREAK:
            self.parts.append("\n\n" if tag in ("p", "div", "h1", "h2", "h3", "h4", "pre", "table") else "\n")
        if tag in self.VOID or tag == "p":  # a p is often left open
            return
        names = " ".join(value or "" for key, value in attrs if key in ("class", "id"))
        self.open.append(tag in self.SKIP or bool(self.SKIP_CLASS.search(names)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and tag != "p" and self.open:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not any(self.open):
            self.parts.append(data)


def read_html(raw: str) -> str:
    page = _Page()
    page.feed(raw)
    return "".join(page.parts)


def read_pod(raw: str) -> str:
    raw = re.sub(r"^=(?:encoding|cut|pod|over|back|begin|end|for).*$", "", raw, flags=re.M)
    raw = re.sub(r"^=\w+ ?", "", raw, flags=re.M)
    for _ in range(3):
        raw = re.sub(r"[BCEFILSXZ]<+ ?([^<>]*?) ?>+", r"\1", raw)
    return raw


def read_roff(raw: str) -> str:
    raw = re.sub(r'^\.\\".*$|^\'\\".*$', "", raw, flags=re.M)
    raw = re.sub(r"^\.(SH|SS|TP|B|I|BR|IR|BI|RB|RI|IP|TH)\b ?", "", raw, flags=re.M)
    raw = re.sub(r"^\..*$", "", raw, flags=re.M)
    return re.sub(r"\\f[BIRP]|\\&|\\/|\\,", "", raw).replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")


def pages(source: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every page of an unpacked package."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not path.is_file() or path.is_symlink():
            continue
        raw = path.read_bytes()
        if name.endswith(".gz"):
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8", errors="replace")
        if source == "linux" and name.endswith(".rst.gz"):
            yield name, text
        elif source.startswith("man") and "/share/man/man" in name:
            yield name, read_roff(text)
        elif source == "perl" and name.endswith(".pod"):
            yield name, read_pod(text)
        elif source == "apache" and "/manual/en/" not in name:
            continue
        elif source in ("python", "postgresql", "django", "apache") and name.endswith(".html"):
            yield name, read_html(text)


def tidy(text: str) -> str:
    text = "\n".join(line.rstrip() for line in text.replace("\r", "").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<=\S)[ \t]{3,}", "  ", text)).replace("¶", "").strip()


def collect() -> list[dict]:
    rows, seen = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for source, package in PACKAGES.items():
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
            (archive,) = Path(folder).glob(f"{package}_*.deb")
            root = Path(folder) / source
            subprocess.run(["dpkg", "-x", archive, root], check=True)
            for name, page in pages(source, root):
                text = tidy(page)
                digest = hashlib.sha256(text.encode()).hexdigest()
                letters = sum(c.isalpha() or c.isspace() for c in text)
                if len(text) < SHORTEST or digest in seen or letters < 0.75 * len(text):
                    continue
                seen.add(digest)
                for start in range(0, len(text), LONGEST):
                    piece = text[start : start + LONGEST]
                    if len(piece) >= SHORTEST:
                        rows.append({"source": source, "work": f"{package}: {name}", "text": piece})
            print(f"{package}: {sum(r['source'] == source for r in rows)} texts", flush=True)
    rows.sort(key=lambda row: hashlib.sha256(row["text"].encode()).hexdigest())
    random.Random(0).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--slice", type=int, help="only so many characters, of held-out works, at most 20,000 of each")
    args = parser.parse_args()
    rows = collect()
    if args.slice:
        chosen, total = [], 0
        for row in rows:
            if row["source"] in SLICE_SOURCES and is_held_out(row["work"]) and len(row["text"]) >= 2_000:
                chosen.append({**row, "text": row["text"][:20_000]})
                total += len(chosen[-1]["text"])
                if total >= args.slice:
                    break
        rows = chosen
    with lzma.open(args.out, "wt", encoding="utf-8", preset=6) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{args.out}: {len(rows)} texts, {sum(len(row['text']) for row in rows) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main()
