"""The command: run many programs, sum up, make failures small.

python -m tests.fuzz --programs 20000 --workers 2 --out results.json
python -m tests.fuzz --seed 17            # one program, and what it meets
python -m tests.fuzz --seed 17 --show     # its text
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict

from .pool import Outcome, Worker, run_many, serve


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random small models through every backend."
    )
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--start-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--show", action="store_true", help="with --seed: print the program instead")
    parser.add_argument("--without", default="", help="rules to make programs without, by name")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument(
        "--backends", default="rewrite,torchscript,onednn", help="of rewrite, torchscript, onednn, inductor"
    )
    parser.add_argument("--inductor-every", type=int, default=0, help="add inductor for each n-th program; 0: never")
    parser.add_argument("--minutes", type=float, help="stop after this long")
    parser.add_argument("--shrink", type=int, default=2, help="how many failures of a signature to make smaller")
    parser.add_argument("--out", help="write findings as JSON here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def one(options: argparse.Namespace) -> int:
    """Show a program, or run it and make each of its failures small."""
    from .grammar import generate
    from .shrink import shrink

    program = generate(options.seed, options.without.split(","))
    print(program.script())
    if options.show:
        return 0
    worker = Worker(options.backends.split(","))
    try:
        findings = worker.run(program).findings
        for finding in findings:
            print(f"{finding.signature}  {finding.where}\n    {finding.detail}\n")
        for finding in {f.signature: f for f in findings if f.failed}.values() if options.shrink else ():
            if made := shrink(program, finding, worker):
                print(f"---- {finding.signature}, smaller: {made[1].detail}\n{made[0].script()}")
    finally:
        worker.close()
    return int(any(finding.failed for finding in findings))


def many(options: argparse.Namespace) -> int:
    """Run programs, and print what they met by signature."""
    from .grammar import generate
    from .shrink import shrink

    backends = options.backends.split(",")
    without = options.without.split(",")
    started, outcomes = time.monotonic(), list[Outcome]()

    def chosen(seed: int) -> list[str]:
        every = options.inductor_every
        return [*backends, "inductor"] if every and seed % every == 0 else backends

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        for finding in outcome.findings:
            if finding.failed:
                print(f"{outcome.seed}: {finding.signature}  {finding.where}  {finding.detail[:160]!r}", flush=True)
        if len(outcomes) % 250 == 0:
            failed = sum(any(f.failed for f in o.findings) for o in outcomes)
            print(f"-- {len(outcomes)} programs, {failed} failed, {time.monotonic() - started:.0f} s", flush=True)

    seeds = range(options.start_seed, options.start_seed + options.programs)
    deadline = None if options.minutes is None else started + 60 * options.minutes
    run_many(seeds, chosen, options.workers, deadline, report, without)

    refused, failed = Counter[str](), defaultdict[str, list[Outcome]](list)
    for outcome in outcomes:
        refused.update({f.signature for f in outcome.findings if not f.failed})
        for signature in {f.signature for f in outcome.findings if f.failed}:
            failed[signature].append(outcome)
    count = sum(any(f.failed for f in o.findings) for o in outcomes)
    no = sum(any(not f.failed for f in o.findings) for o in outcomes)
    print(
        f"\n{len(outcomes)} programs in {time.monotonic() - started:.0f} s: {count} failed, {no} refused somewhere\n\n"
        "refused:"
    )
    for signature, number in refused.most_common():
        print(f"  {number:5}  {signature}")
    print("\nfailed:")
    for signature, group in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"  {len(group):5}  {signature}  seeds {[o.seed for o in group][:12]}")
    small = []
    worker = Worker(())
    try:
        for signature, group in failed.items():
            for outcome in group[: options.shrink]:
                finding = next(f for f in outcome.findings if f.signature == signature)
                made = shrink(generate(outcome.seed, without), finding, worker)
                if made is None:
                    print(f"\n---- {signature}, seed {outcome.seed}: not alone (after {outcome.before} others)")
                    continue
                small.append({"seed": outcome.seed, "signature": signature, "rules": made[0].rules,
                              "detail": made[1].detail, "script": made[0].script()})  # fmt: skip
                print(f"\n---- {signature}, seed {outcome.seed}: {made[1].detail}\n{made[0].script()}", flush=True)
    finally:
        worker.close()
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"programs": len(outcomes), "failed": count, "refused": dict(refused),
                       "without": without, "outcomes": [asdict(o) for o in outcomes if o.findings],
                       "smaller": small}, file, indent=1)  # fmt: skip
    return int(bool(failed))


def main() -> int:
    options = arguments()
    if options.serve:
        serve()
        return 0
    return one(options) if options.seed is not None else many(options)


if __name__ == "__main__":
    sys.exit(main())
