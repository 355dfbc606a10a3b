"""A strict little reader of HTML for the tests: it raises where tags do not close in order, and gives text by element id."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


class Page(HTMLParser):
    """A parsed page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.attributes: list[tuple[str, str, str]] = []
        """(tag, name, value) of every attribute."""
        self.tags: set[str] = set()
        self.by_id: dict[str, str] = {}
        """Text within every element that has an id."""
        self.rows: dict[str, list[list[str]]] = {}
        """Cells of the rows of every table that has an id."""
        self.unseen: list[tuple[str, str]] = []
        """("script" or "style", text) of what is not shown as words."""
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        name = dict(attrs).get("id")
        if name is not None:
            assert name not in self.by_id, f"id {name} is used twice"
            self.by_id[name] = ""
        table = self._table()
        if table and tag == "tr":
            self.rows.setdefault(table, []).append([])
        if table and tag in ("td", "th"):
            self.rows[table][-1].append("")
        if tag not in VOID:
            self._open.append((tag, name))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open, f"</{tag}> closes nothing"
            assert self._open[-1][0] == tag, f"</{tag}> closes <{self._open[-1][0]}>"
            self._open.pop()

    def handle_data(self, data: str) -> None:
        data = data.replace(NO_BREAK_SPACE, " ")
        if self._open and self._open[-1][0] in ("script", "style"):
            self.unseen.append((self._open[-1][0], data))
            return
        for _, name in self._open:
            if name is not None:
                self.by_id[name] += data
        table = self._table()
        if table and any(tag in ("td", "th") for tag, _ in self._open):
            self.rows[table][-1][-1] += data

    def cells(self, table: str) -> dict[str, list[str]]:
        """The rows of `<table>-table` by their first cell, headings left out."""
        return {row[0]: row[1:] for row in self.rows[f"{table}-table"][1:]}

    def _table(self) -> str | None:
        return next((name for tag, name in reversed(self._open) if tag == "table"), None)
