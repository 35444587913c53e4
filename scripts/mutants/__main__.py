"""The mutation check: faults are put into the core one by one, and for each of them some test must fail.

    python scripts/mutants                 the whole table; exits 1 if a fault survives
    python scripts/mutants --only lock     those whose name, file or table has the word
    python scripts/mutants --list          the table without trials

Each fault of the tables beside this file goes into a copy of src/ of its own, on which the tests run that should catch
it. The tests must pass on an unchanged copy first. Why no library does this: cosmic-ray makes 14,301 mutants of these
three folders, at some seconds each that is a day on two cores, many of them the same program in other words (a hint, a
message); and the faults that matter here are none of its operators: a tail that never takes over, a charge that is not
passed on, a grant that another one's chunk eats into.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from table import Mutant, read, unfit
from trial import Verdict, attempt, passes_unchanged


def main() -> int:
    """Try every mutant; return the exit status."""
    parser = argparse.ArgumentParser(description="put faults into the core and see that tests catch them")
    parser.add_argument("--only", metavar="WORD", default="", help="mutants whose name or file has the word")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at once (default: one per core)")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    options = parser.parse_args()
    mutants = [mutant for mutant in read() if options.only in f"{mutant.name} {mutant.file}"]
    if options.list:
        print("\n".join(f"{mutant.file:<24} {mutant.name}\n    {mutant.change()}" for mutant in mutants))
        return 0
    for fault in (out_of_date := unfit(mutants)):
        print(fault)
    if out_of_date:
        return 1
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        if not unchanged_passes(pool, mutants):
            return 1
        verdicts = tried(pool, mutants)
    print("\n" + "\n".join(table_lines(mutants, verdicts)))
    return summary(verdicts, time.monotonic() - began)


def unchanged_passes(pool: ThreadPoolExecutor, mutants: Sequence[Mutant]) -> bool:
    """Run all tests that the mutants name on unchanged copies, file by file; say what fails."""
    by_file: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            by_file.setdefault(test.partition("::")[0], {})[test] = None
    wholes = [[name] if name in tests else list(tests) for name, tests in by_file.items()]
    verdicts = list(pool.map(passes_unchanged, wholes))
    for verdict in verdicts:
        if verdict.word != "passed":
            print(f"fails without any fault: {verdict.test}")
    print(f"{len(wholes)} files of tests pass on an unchanged copy", flush=True)
    return all(verdict.word == "passed" for verdict in verdicts)


def tried(pool: ThreadPoolExecutor, mutants: Sequence[Mutant]) -> list[Verdict]:
    """Try all mutants, some at once, and report each as it is done; return the verdicts in the mutants' order."""
    trials = {pool.submit(attempt, mutant): mutant for mutant in mutants}
    for done, trial in enumerate(as_completed(trials), start=1):
        verdict = trial.result()
        print(f"{done:>3}/{len(mutants)} {verdict.word:<8} {verdict.seconds:5.1f} s  {trials[trial].name}", flush=True)
    return [trial.result() for trial in trials]


def table_lines(mutants: Sequence[Mutant], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the mutation table as Markdown."""
    lines = ["| mutant | file | what was changed | caught by | s |", "|---|---|---|---|---|"]
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        hung = " (it hangs)" if verdict.word == "hang" else ""
        file, _, test = verdict.test.partition("::")
        test = f"{file.rpartition('/')[2]}::{test}" if verdict.is_caught else f"**{verdict.word}** {verdict.test}"
        change, test = (text.replace("|", "\\|") for text in (mutant.change(), test))
        lines.append(f"| {mutant.name} | {mutant.file} | `{change}` | {test}{hung} | {verdict.seconds:.1f} |")
    return lines


def summary(verdicts: Sequence[Verdict], seconds: float) -> int:
    """Print the count; return 0 when all were caught, else 1."""
    survivors = sum(verdict.word == "SURVIVED" for verdict in verdicts)
    broken = sum(verdict.word == "BROKEN" for verdict in verdicts)
    caught = sum(verdict.is_caught for verdict in verdicts)
    print(f"\n{len(verdicts)} mutants, {caught} caught, {survivors} survivors, {broken} broken, {seconds:.0f} s")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
