"""`headway watch` answers on loopback, to those who have the token, and sends what is new once."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from report_runs import make_run, step_record

from headway.accounts import Audit, audit_file
from headway.report import run_data
from headway.report.run_data import RunReader
from headway.report.watch import CannotServe, make_server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    pytest.importorskip("plotly")
    run = make_run(tmp_path / "a", num_steps=3, of=6)
    server, url = make_server([run], port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield run, url
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str, seen: str = "") -> tuple[int, dict]:
    with urlopen(url.replace("/?", "/report?") + f"&seen={seen}") as answer:
        body = answer.read()
        return answer.status, json.loads(body) if body else {}


def test_the_whole_ledger_is_read_again_only_when_the_run_has_grown_by_a_tenth(tmp_path: Path, monkeypatch):
    run = make_run(tmp_path / "a", num_steps=30, of=36)
    proofs: list[Path] = []

    def audit(path: Path, *, max_staleness: int | None) -> Audit:
        proofs.append(path)
        return audit_file(path, max_staleness=max_staleness)

    monkeypatch.setattr(run_data, "audit_file", audit)
    reader = RunReader(run)
    counts = []
    for step in range(30, 37):
        assert reader.read().audit is not None
        counts.append(len(proofs))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_record(step)) + "\n")
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_a_page_is_told_of_new_steps_and_of_nothing_twice(served: tuple[Path, str]):
    run, url = served
    status, first = ask(url)
    assert status == 200 and {"label": "steps", "value": "3 of 6"} in first["report"]["runs"][0]["tiles"]
    assert ask(url, first["stamp"]) == (204, {})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_record(3)) + "\n")
    status, second = ask(url, first["stamp"])
    assert status == 200 and {"label": "steps", "value": "4 of 6"} in second["report"]["runs"][0]["tiles"]


def test_only_the_address_with_its_token_is_answered(served: tuple[Path, str]):
    _, url = served
    assert url.startswith("http://127.0.0.1:")
    with urlopen(url) as answer:
        assert b"Headway report" in answer.read()
    for wrong, code in ((url[:-1], 403), (url.split("?")[0], 403), (url.replace("/?", "/config.toml?"), 404)):
        with pytest.raises(HTTPError) as refused:
            urlopen(wrong)
        assert refused.value.code == code
        refused.value.close()


def test_a_port_in_use_is_an_error_that_names_the_mend(served: tuple[Path, str]):
    run, url = served
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(CannotServe, match="give another --port"):
        make_server([run], port=port)
