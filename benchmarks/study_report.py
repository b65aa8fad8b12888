"""What the study prints: the paper's tables, what they say about its claims, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_lm.evaluation.statistics import Interval, bootstrap, mean_and_spread
from mars_lm.evaluation.tables import markdown
from mars_lm.rows import read_objects

if TYPE_CHECKING:
    from study import Study

Found = dict[str, Any]  # row -> mode -> seed -> {"score": ..., "speed": ...}
Losses = dict[str, dict[str, Any]]  # row -> what Study.held_out gives
FLOOR = 5.0  # percent; models that solve no more can't be told apart by what they solve


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation over seeds, in percent."""
    mean, deviation = mean_and_spread(values)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"


def nats(rows: list[list[float]]) -> float:
    """Nats a token of answers [nats, tokens]."""
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def difference(losses: Losses, one: str, other: str) -> Interval | None:
    """Nats a token of one row's model above another's on the same answers, with its 95% interval."""
    if one not in losses or other not in losses:
        return None
    pairs = list(zip(losses[one]["rows"], losses[other]["rows"], strict=True))
    return bootstrap(pairs, lambda drawn: nats([a for a, _ in drawn]) - nats([b for _, b in drawn]))


def tables(study: Study, found: Found, tau: float, losses: Losses) -> str:
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
    if losses:
        lines = []
        for row in study.rows:
            if row.name not in losses:
                continue
            apart, agreement = difference(losses, row.name, "ar"), losses[row.name]["agreement"]
            shown_apart = "–"
            if apart is not None and row.name != "ar":
                shown_apart = f"{apart.value:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}]"
            held = "–" if agreement is None else Interval(**agreement).percent()
            lines.append([row.title, f"{nats(losses[row.name]['rows']):.3f}", shown_apart, held])
        answers = len(next(iter(losses.values()))["rows"])
        text += [
            "",
            f"The models as AR on {answers} held-out answers, and the share of their own lossy text that "
            "they would have written as AR:",
            "",
            markdown(
                ["model", "nats a token", "above AR SFT [95%]", f"tau = {tau}: AR's own tokens, % [95%]"],
                lines,
            ),
        ]
    return "\n".join(text)


def claims(study: Study, found: Found, tau: float, losses: Losses) -> list[dict[str, str]]:
    """Each of the paper's claims: supported, contradicted or not decided by these runs, with the figures."""

    def values(row: str, mode: str = "one-token") -> list[float]:
        return [100 * kept["score"]["value"] for kept in found.get(row, {}).get(mode, {}).values()]

    def compare(
        claim: str, better: str, worse: str, names: tuple[str, str], worse_mode: str = "one-token"
    ) -> dict[str, str]:
        """Whether one row is as good as the other; a difference within the seeds' spread decides nothing.

        Rows that solve next to nothing are told apart by their losses.
        """
        apart = difference(losses, better, worse)
        better_values, worse_values = values(better), values(worse, worse_mode)
        if not better_values or not worse_values:
            return {"claim": claim, "verdict": "not run", "figures": ""}
        solved = f"{names[0]} {better_values[0]:.1f}%, {names[1]} {worse_values[0]:.1f}%"
        if max(better_values + worse_values) <= FLOOR:
            if apart is None or worse_mode != "one-token":
                return {
                    "claim": claim,
                    "verdict": "can't tell",
                    "figures": f"{solved}: next to nothing solved",
                }
            verdict = "supported" if apart.high < 0 else "contradicted" if apart.low > 0 else "can't tell"
            return {
                "claim": claim,
                "verdict": verdict + ", by the loss" * (verdict != "can't tell"),
                "figures": f"{names[0]} {nats(losses[better]['rows']):.3f} nats, "
                f"{names[1]} {nats(losses[worse]['rows']):.3f} "
                f"({apart.value:+.3f} [{apart.low:+.3f}, {apart.high:+.3f}]); {solved}",
            }
        (a, sa), (b, sb) = mean_and_spread(better_values), mean_and_spread(worse_values)
        noise = max((sa**2 + sb**2) ** 0.5, 100 * (0.25 / study.size.test / len(better_values)) ** 0.5)
        verdict = "supported" if a - b > noise else "contradicted" if b - a > noise else "can't tell"
        return {
            "claim": claim,
            "verdict": verdict,
            "figures": f"{names[0]} {a:.1f} ± {sa:.1f}, {names[1]} {b:.1f} ± {sb:.1f}",
        }

    small, large = study.size.block_sizes[0], study.size.block_sizes[-1]
    ar, mars = "ar", f"mars-{small}"
    out = []
    keeps = compare(f"MARS at tau 1 is at least as good as AR SFT (B={small})", mars, ar, ("MARS", "AR SFT"))
    if keeps["verdict"] == "can't tell":
        keeps["verdict"] = "supported (within the spread)"
    out.append(keeps)
    out.append(compare("MARS beats AR SFT trained twice as long", mars, "ar-twice", ("MARS", "AR twice")))
    out.append(compare("MARS beats AR SFT with the same compute", mars, "ar-matched", ("MARS", "AR matched")))
    out.append(
        compare(
            "Block diffusion costs accuracy",
            ar,
            f"block-diffusion-{small}",
            ("AR SFT", "block diffusion"),
            "block-diffusion-1",
        )
    )
    without = "mars-no-sft-{}"
    out.append(
        compare(
            f"Without the SFT loss accuracy falls from B={small} to B={large}",
            without.format(small),
            without.format(large),
            (f"B={small}", f"B={large}"),
        )
    )
    out.append(
        compare(
            f"With the SFT loss it does not (B={large} with against without)",
            f"mars-{large}",
            without.format(large),
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
            figures = f"{rate:.2f} tokens per forward, {change:+.1f} points"
            if max(one + lossy) <= FLOOR:
                verdict = "can't tell"
                if row.name in losses:
                    agreement = Interval(**losses[row.name]["agreement"]).percent()
                    figures += f" where nothing is solved; {agreement}% of its tokens are its AR's own"
            out.append(
                {
                    "claim": f"tau {tau} gives more tokens per forward for one or two points ({row.title})",
                    "verdict": verdict,
                    "figures": figures,
                }
            )
    for row in study.rows:
        if row.block_size is None or row.recipe == "block-diffusion":
            continue
        one, exact = values(row.name), values(row.name, "exact")
        if one and exact:
            kept = found[row.name]["exact"].values()
            rate = sum(k["speed"]["tokens"] for k in kept) / sum(k["speed"]["forwards"] for k in kept)
            enough = study.part == "real" or rate > 2
            same = same_texts(study, row.name)
            out.append(
                {
                    "claim": "Exact mode: AR's accuracy, digit for digit"
                    + f"{', at more than 2' * (study.part == 'scratch')} ({row.title})",
                    "verdict": "supported" if one == exact and enough else "contradicted",
                    "figures": f"accuracy {'equal' if one == exact else 'differs'}, {rate:.2f} a forward"
                    + (f", {same[0]} of {same[1]} texts the same" if same else ""),
                }
            )
    return out


def same_texts(study: Study, row: str) -> tuple[int, int] | None:
    """How many of a row's answers are the same in exact and in one-token mode; None: they were not kept."""
    same = every = 0
    for seed in study.size.seeds:
        files = [
            sorted((study.folder(seed, row) / "scores" / mode / "samples").glob("*.jsonl"))
            for mode in ("one-token", "exact")
        ]
        for one, exact in zip(*files, strict=False):
            # A sample stands there once for each of the task's filters.
            texts, others = (
                {(row["task"], row["doc_id"]): row["resps"] for _, row in read_objects(file)}
                for file in (one, exact)
            )
            same, every = same + sum(texts[key] == others.get(key) for key in texts), every + len(texts)
    return (same, every) if every else None


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
