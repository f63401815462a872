"""Whether AIPerf's own models take what `millrace bench -o` writes for it; in AIPerf's environment.

python reads.py FOLDER_OF_OURS FOLDER_OF_THEIRS
"""

import csv
import sys
from pathlib import Path

from aiperf.common.models import MetricRecordInfo
from aiperf.common.models.export_models import JsonExportData

ours, theirs = map(Path, sys.argv[1:3])
told = JsonExportData.model_validate_json((ours / "profile_export_aiperf.json").read_text())
assert told.time_to_first_token is not None and told.time_to_first_token.avg > 0
lines = (ours / "profile_export.jsonl").read_text().splitlines()
assert lines and all(MetricRecordInfo.model_validate_json(line).metrics for line in lines)
ours_csv, theirs_csv = (
    list(csv.reader((folder / "profile_export_aiperf.csv").read_text().splitlines())) for folder in (ours, theirs)
)
assert ours_csv[0] == theirs_csv[0], (ours_csv[0], theirs_csv[0])
unknown = {row[0] for row in ours_csv if row} - {row[0] for row in theirs_csv if row}
assert not unknown, f"rows that it does not write: {unknown}"
