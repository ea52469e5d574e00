"""The transcripts' gateway and words (`tests/http/conftest.py`)."""

import importlib.util
import sys
from pathlib import Path

_NAME = "http_transcripts"
_spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "http" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
transcripts = importlib.util.module_from_spec(_spec)
sys.modules.setdefault(_NAME, transcripts)  # dataclasses look their module up
_spec.loader.exec_module(transcripts)

start = transcripts.start
http = transcripts.http
