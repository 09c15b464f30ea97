"""The numbers of the study of M3PO, as result rows: from the runs that results/study_m3po holds.

    python benchmarks/study_m3po.py

The runs are those of `python grpo_study.py configs/study_m3po.yaml` at the tag `study-1`, on the card that is
named. This makes the analysis of them anew, on any machine.
"""

import sys

from common import RESULTS, ROOT, write_results

sys.path.insert(0, str(ROOT))
from reporting.study import result_rows, write_study

CARD = "NVIDIA H200"  # of the runs, not of this analysis


def main():
    folder = RESULTS / "study_m3po"
    found = write_study(folder)
    (folder / "study.html").unlink()  # of a megabyte and more, and made again by one command
    if not found["complete"]:
        raise SystemExit(f"not complete: {len(found['missing'])} runs are missing in {folder.name}")
    codes = sorted({run["code_hash"] for run in found["runs"]})
    write_results(
        "study_m3po", result_rows(found), card=CARD, verdict=found["verdict"]["sentence"], code=codes
    )


if __name__ == "__main__":
    main()
