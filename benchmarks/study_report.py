"""What the study prints: the paper's tables, what they say about its claims, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_lm.evaluation.statistics import mean_and_spread
from mars_lm.evaluation.tables import markdown

if TYPE_CHECKING:
    from study import Study

Found = dict[str, Any]  # row -> mode -> seed -> {"score": ..., "speed": ...}


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation over seeds, in percent."""
    mean, deviation = mean_and_spread(values)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"


def tables(study: Study, found: Found, tau: float) -> str:
    """The paper's tables 2 to 4 as far as the study has got, in Markdown."""

    def accuracy(row: str, mode: str) -> list[float]:
        return [kept["score"]["value"] for kept in found.get(row, {}).get(mode, {}).values()]

    def per_forward(row: str, mode: str) -> str:
        kept = found.get(row, {}).get(mode, {}).values()
        forwards = sum(one["speed"]["forwards"] for one in kept)
        return f"{sum(one['speed']['tokens'] for one in kept) / forwards:.2f}" if forwards else "not run"

    def shown(row: str, mode: str) -> str:
        values = accuracy(row, mode)
        return spread(values) if values else "not run"

    lines = []
    for row in study.rows:
        diffusion = row.recipe == "block-diffusion"
        one = "block-diffusion-1" if diffusion else "one-token"
        line = [row.title, shown(row.name, one)]
        if row.block_size is None:
            line += ["–"] * 5
        else:
            lossy = f"block-diffusion-{tau}" if diffusion else "lossy"
            before, after = accuracy(row.name, one), accuracy(row.name, lossy)
            change = "not run"
            if before and after:
                change = f"{100 * (sum(after) / len(after) - sum(before) / len(before)):+.1f}"
            line += [shown(row.name, lossy), change, per_forward(row.name, lossy)]
            line += ["–", "–"] if diffusion else [shown(row.name, "exact"), per_forward(row.name, "exact")]
        lines.append(line)
    header = [
        "model",
        "tau = 1, %",
        f"tau = {tau}, %",
        "change",
        "tokens/forward",
        "exact, %",
        "tokens/forward",
    ]
    seeds = (
        f"{len(study.size.seeds)} seeds: mean ± standard deviation"
        if len(study.size.seeds) > 1
        else "one seed"
    )
    text = [f"Accuracy on {study.size.test} held-out problems ({seeds}).", "", markdown(header, lines)]
    drafters = [m for m in ("jacobi", "prompt-lookup", "medusa") if accuracy("ar", m)]
    if drafters:
        text += [
            "",
            "Other ways to the AR SFT model's own text:",
            "",
            markdown(
                ["decoding", "accuracy, %", "tokens/forward"],
                [[mode, shown("ar", mode), per_forward("ar", mode)] for mode in ("one-token", *drafters)],
            ),
        ]
    return "\n".join(text)


def claims(study: Study, found: Found, tau: float) -> list[dict[str, str]]:
    """Each of the paper's claims: supported, contradicted or not decided by these runs, with the figures."""

    def values(row: str, mode: str = "one-token") -> list[float]:
        return [100 * kept["score"]["value"] for kept in found.get(row, {}).get(mode, {}).values()]

    def compare(
        claim: str, better: list[float], worse: list[float], names: tuple[str, str]
    ) -> dict[str, str]:
        """Whether one is as good as the other; a difference within the seeds' spread decides nothing."""
        if not better or not worse:
            return {"claim": claim, "verdict": "not run", "figures": ""}
        (a, sa), (b, sb) = mean_and_spread(better), mean_and_spread(worse)
        noise = max((sa**2 + sb**2) ** 0.5, 100 * (0.25 / study.size.test / len(better)) ** 0.5)
        verdict = "supported" if a - b > noise else "contradicted" if b - a > noise else "can't tell"
        return {
            "claim": claim,
            "verdict": verdict,
            "figures": f"{names[0]} {a:.1f} ± {sa:.1f}, {names[1]} {b:.1f} ± {sb:.1f}",
        }

    small, large = study.size.block_sizes[0], study.size.block_sizes[-1]
    ar, mars = values("ar"), values(f"mars-{small}")
    out = []
    keeps = compare(f"MARS at tau 1 is at least as good as AR SFT (B={small})", mars, ar, ("MARS", "AR SFT"))
    if keeps["verdict"] == "can't tell":
        keeps["verdict"] = "supported (within the spread)"
    out.append(keeps)
    out.append(
        compare("MARS beats AR SFT trained twice as long", mars, values("ar-twice"), ("MARS", "AR twice"))
    )
    out.append(
        compare("MARS beats AR SFT with the same compute", mars, values("ar-matched"), ("MARS", "AR matched"))
    )
    out.append(
        compare(
            "Block diffusion costs accuracy",
            ar,
            values(f"block-diffusion-{small}", "block-diffusion-1"),
            ("AR SFT", "block diffusion"),
        )
    )
    without = "mars-no-sft-{}"
    out.append(
        compare(
            f"Without the SFT loss accuracy falls from B={small} to B={large}",
            values(without.format(small)),
            values(without.format(large)),
            (f"B={small}", f"B={large}"),
        )
    )
    out.append(
        compare(
            f"With the SFT loss it does not (B={large} with against without)",
            values(f"mars-{large}"),
            values(without.format(large)),
            ("with", "without"),
        )
    )
    for row in study.rows:
        one, lossy = values(row.name), values(row.name, "lossy")
        if row.recipe in ("mars", "mars-window") and one and lossy:
            change = sum(lossy) / len(lossy) - sum(one) / len(one)
            kept = found[row.name]["lossy"].values()
            rate = sum(k["speed"]["tokens"] for k in kept) / sum(k["speed"]["forwards"] for k in kept)
            verdict = "supported" if rate > 1.2 and change > -3 else "contradicted"
            out.append(
                {
                    "claim": f"tau {tau} gives more tokens per forward for one or two points ({row.title})",
                    "verdict": verdict,
                    "figures": f"{rate:.2f} tokens per forward, {change:+.1f} points",
                }
            )
    for row in study.rows:
        if row.block_size is None or row.recipe == "block-diffusion":
            continue
        one, exact = values(row.name), values(row.name, "exact")
        if one and exact:
            kept = found[row.name]["exact"].values()
            rate = sum(k["speed"]["tokens"] for k in kept) / sum(k["speed"]["forwards"] for k in kept)
            out.append(
                {
                    "claim": f"Exact mode: AR's accuracy, digit for digit, at more than 2 ({row.title})",
                    "verdict": "supported" if one == exact and rate > 2 else "contradicted",
                    "figures": f"accuracy {'equal' if one == exact else 'differs'}, {rate:.2f} a forward",
                }
            )
    return out


def picture(study: Study, found: Found, path: Path) -> None:
    """Accuracy against tokens per forward, a mark a row and mode, with the seeds' spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 5))
    marks = {"one-token": "o", "lossy": "s", "exact": "^"}
    for number, row in enumerate(study.rows):
        for mode, kept in found.get(row.name, {}).items():
            mean, deviation = mean_and_spread([100 * one["score"]["value"] for one in kept.values()])
            forwards = sum(one["speed"]["forwards"] for one in kept.values())
            rate = sum(one["speed"]["tokens"] for one in kept.values()) / forwards
            axis.errorbar(
                rate,
                mean,
                yerr=deviation,
                fmt=marks.get(mode, "x"),
                color=f"C{number % 10}",
                capsize=2,
                markersize=5,
                label=f"{row.title}, {mode}",
            )
    axis.set_xlabel("tokens per forward")
    axis.set_ylabel("accuracy, %")
    axis.set_ylim(-2, 104)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
