"""A page that a person asked for: its frame, and its file."""

from pathlib import Path

from yatt.adapters.files.files import write_atomically
from yatt.errors import ConfigError

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with a page, whatever of a stranger gets into it: nothing runs or is fetched."""

STYLE = """
:root { color-scheme: light dark; --bg:#f6f7f9; --card:#fff; --ink:#1b2330; --soft:#5d6878; --rule:#dfe3e9;
  --lane:#eef0f4; --c1:#2563c9; --c2:#d9730d; --c3:#0b8a5f; --c4:#8e44ad; --c5:#c0392b; --c6:#127f9c;
  --trainer:#2563c9; --rollout:#d9730d; --genrm:#0b8a5f; --weights:#8e44ad; --save:#127f9c;
  --validate:#a8871a; --start:#8893a3; --bad:#c0392b; --warn-bg:#fdecea; --good:#0b8a5f;
  --idle:#c9d0da; --switch:#8a6d5a; --restore:#5b5fc7; --queue:#a9b2bf; }
@media (prefers-color-scheme: dark) { :root { --bg:#12161c; --card:#1a2029; --ink:#e4e8ee; --soft:#98a4b5;
  --rule:#2d3644; --lane:#222a35; --c1:#6ea2ff; --c2:#f2a154; --c3:#4cc79a; --c4:#c08ae0; --c5:#ef7b6d;
  --c6:#55bcd8; --trainer:#3f74d6; --rollout:#c26a17; --genrm:#1c8d66; --weights:#8a4fb0; --save:#1c7f99;
  --validate:#8f7420; --start:#566274; --bad:#ef7b6d; --warn-bg:#3a2022; --good:#4cc79a;
  --idle:#3a4556; --switch:#9a7b66; --restore:#7478d8; --queue:#4c596c; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5 system-ui, "Segoe UI",
  "Helvetica Neue", Arial, sans-serif; }
main { max-width:1240px; margin:0 auto; padding:24px 16px 64px; }
h1 { font-size:24px; margin:0; overflow-wrap:anywhere; } h2 { font-size:18px; margin:36px 0 10px; }
h3 { font-size:14px; font-weight:600; margin:0 0 6px; }
.top { display:flex; flex-wrap:wrap; gap:6px 14px; align-items:center; }
.soft, figcaption, .none { color:var(--soft); font-size:13px; } .none { margin:4px 0; }
.card { background:var(--card); border:1px solid var(--rule); border-radius:8px; padding:14px 16px;
  margin:0 0 12px; overflow-x:auto; }
.grid-cards { display:grid; grid-template-columns:repeat(auto-fill, minmax(340px, 1fr)); gap:12px; }
.grid-cards .card { margin:0; } .grid-halves { display:grid; gap:12px; margin:0 0 12px;
  grid-template-columns:repeat(auto-fit, minmax(min(100%, 480px), 1fr)); } .grid-halves .card { margin:0; }
.facts { display:grid; grid-template-columns:repeat(auto-fill, minmax(150px, 1fr)); gap:10px; margin:16px 0; }
.facts div { background:var(--card); border:1px solid var(--rule); border-radius:8px; padding:8px 12px; }
.facts b { display:block; font-size:19px; font-weight:600; overflow-wrap:anywhere; }
.facts span { color:var(--soft); font-size:12.5px; }
.state { border-radius:99px; padding:2px 12px; font-size:13px; font-weight:600; color:#fff;
  background:var(--start); }
.state.finished { background:#0b8a5f; } .state.failed { background:#c0392b; }
.state.running { background:#2563c9; }
.say { border-left:4px solid var(--good); padding:6px 12px; margin:0 0 10px; background:var(--lane);
  border-radius:0 6px 6px 0; } table + .say { margin:12px 0 0; }
  .say.warn { border-color:var(--bad); background:var(--warn-bg); }
table { border-collapse:collapse; width:100%; font-size:14px; } th { text-align:left; font-weight:600;
  color:var(--soft); font-size:12.5px; } th, td { padding:4px 14px 4px 0; border-bottom:1px solid var(--rule);
  vertical-align:top; } tr:last-child td { border-bottom:0; } td.n, th.n { text-align:right;
  font-variant-numeric:tabular-nums; white-space:nowrap; } td.wrap { overflow-wrap:anywhere;
  white-space:pre-wrap; width:60%; }
  table.attempts td.wrap { width:32%; } td.when { white-space:nowrap; color:var(--soft); width:1%; }
code, pre { font:13px/1.45 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
pre { white-space:pre-wrap; overflow-wrap:anywhere; margin:2px 0 8px; padding:8px 10px;
  background:var(--lane); border-radius:6px; }
svg { display:block; width:100%; height:auto; } svg.timeline { min-width:760px; margin-bottom:14px; }
svg text { fill:var(--ink); font-size:12px; font-family:inherit; } svg text.tick { fill:var(--soft);
  font-size:11px; } svg text.on { fill:#fff; font-size:11.5px; pointer-events:none; }
.grid { stroke:var(--rule); stroke-width:1; } .axis, .change { stroke:var(--soft); }
.change { stroke-width:1.5; stroke-dasharray:3 3; } .lane { fill:var(--lane); }
.faint { opacity:.3; } .line { fill:none; stroke-width:2; stroke-linejoin:round; stroke:currentColor; }
.dot { fill:currentColor; stroke:var(--card); stroke-width:1; }
.c1 { color:var(--c1); } .c2 { color:var(--c2); } .c3 { color:var(--c3); } .c4 { color:var(--c4); }
.c5 { color:var(--c5); } .c6 { color:var(--c6); }
.p-trainer { fill:var(--trainer); background:var(--trainer); } .p-rollout { fill:var(--rollout);
  background:var(--rollout); } .p-genrm { fill:var(--genrm); background:var(--genrm); }
.p-weights { fill:var(--weights); background:var(--weights); } .p-save { fill:var(--save);
  background:var(--save); } .p-validate { fill:var(--validate); background:var(--validate); }
.p-start { fill:var(--start); background:var(--start); } .p-bad { fill:var(--bad); background:var(--bad); }
.p-idle { fill:var(--idle); background:var(--idle); }
.p-switch { fill:var(--switch); background:var(--switch); } .p-restore { background:var(--restore); }
.p-queue { background:var(--queue); }
svg.key { display:inline-block; width:20px; height:8px; margin-right:8px; }
.differences td.wrap { width:auto; } .narrow { display:none; }
@media (max-width: 700px) { .wide { display:none; } .narrow { display:block; } }
.mark { fill:var(--bad); stroke:var(--card); }
.bar { display:flex; height:26px; border-radius:6px; overflow:hidden; gap:1px; margin:4px 0 12px; }
.swatch { display:inline-block; width:11px; height:11px; border-radius:3px; margin-right:8px; }
.legend { display:flex; flex-wrap:wrap; gap:4px 18px; font-size:13px; color:var(--soft); margin:0 0 10px; }
details { margin:0 0 8px; } summary { cursor:pointer; font-weight:600; padding:4px 0; }
.samples { display:grid; grid-template-columns:repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap:12px; }
.pill { display:inline-block; border:1px solid var(--rule); border-radius:99px; padding:0 10px;
  font-size:13px; margin:0 6px 6px 0; } .pill b { font-variant-numeric:tabular-nums; }
.thumbs { display:flex; flex-wrap:wrap; gap:6px; margin:2px 0 4px; } .thumbs img { max-width:96px;
  max-height:96px; border-radius:4px; } .thumb { width:96px; height:96px; overflow:hidden; padding:4px;
  background:var(--idle); border-radius:4px; font-size:11px; line-height:1.25; overflow-wrap:anywhere; }
.label { color:var(--soft); font-size:12px; }
""".strip()


def whole_page(title: str, body: str) -> str:
    """Returns the HTML text of a page.

    Args:
        title: escaped.
        body: HTML.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def write_page(path: Path, page: str, option: str) -> None:
    """Writes a whole page, or nothing.

    Args:
        option: of the command line, which names the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_atomically(path, page.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"{path}: the page cannot be written ({error.strerror}). Name another file with {option}."
        ) from error
