"""The table of measure_node.py."""

import json


def table(report: dict) -> list[str]:
    """Markdown."""
    lines = []
    if "parity" in report:
        lines += [
            "",
            "| layout | run | against | wanted equal | outcome |",
            "| --- | --- | --- | --- | --- |",
        ]
        for line in report["parity"]:
            outcome = "passed" if line["passed"] else f"FAILED: {line.get('first_difference', line['exit'])}"
            lines.append(
                f"| {line['layout']} | {line['run']} | {line['against'] or '-'} | {line.get('wanted', '-')} | "
                f"{outcome} |"
            )
    if "gather" in report:
        lines += [
            "",
            "| link | gather | speed-up | ms | raw ms | ratio |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for link, found in report["gather"].items():
            for mode, m in found.get("modes", {}).items():
                shown = m.get("unavailable") or (
                    f"{m['speedup']:.2f} | {m['milliseconds']:.2f} | {m['raw_milliseconds']:.2f} | {m['ratio']:.3f}"
                )
                lines.append(f"| {link} | {mode} | {shown} |")
            if "failed" in found:
                lines.append(f"| {link} | FAILED: {found['failed'].splitlines()[-1]} |")
    for stage in ("dispatch", "shuffle"):
        for trace, links in report.get(stage, {}).items():
            for link, found in links.items():
                lines += [
                    "",
                    f"{stage}, {trace}, {link}:",
                    "",
                    "```",
                    json.dumps(found, indent=1)[:4000],
                    "```",
                ]
    if "steps" in report:
        lines += [
            "",
            "| config | link | run | ms | of stock | predicted ms | of stock | peak GB |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for config, links in report["steps"].items():
            for link, runs in links.items():
                said = report["predict"][config][link]
                for name, run in runs.items():
                    lines.append(
                        f"| {config} | {link} | {name} | {milliseconds(run['seconds'])} | "
                        f"{share(run['seconds'], runs['stock']['seconds'])} | {milliseconds(said[name])} | "
                        f"{share(said[name], said['stock'])} | "
                        f"{'-' if run['peak_bytes'] is None else format(run['peak_bytes'] / 1e9, '.1f')} |"
                    )
    return lines


def milliseconds(seconds: float | None) -> str:
    return "FAILED" if seconds is None else f"{1e3 * seconds:.1f}"


def share(seconds: float | None, of: float | None) -> str:
    return "-" if seconds is None or of is None else f"{seconds / of:.2f}"
