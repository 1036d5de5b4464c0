"""The same store in a bucket, against a server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import boto3
import pytest
from moto.server import ThreadedMotoServer

from raybench.results.folder import open_folder
from raybench.results.store import StoreError, Writer, completed_rounds, load, suites
from tests.results.made import TRACK, rank_rows, run_row, skipped_row

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a folder in an empty bucket; the server keeps buckets from test to test."""
    name = f"bench-{uuid4().hex[:8]}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket=name)
    yield f"s3://{name}/some/results?scheme=http&endpoint_override={host}%3A{port}&region=us-east-1"
    server.stop()


def test_rounds_are_written_read_and_replaced(bucket: str) -> None:
    writer = Writer(bucket, "s", {"tracks": []})
    writer.check()
    writer.write_round(TRACK, "naive", 0, 0, {"runs": [skipped_row("interrupted")]})
    for number in range(2):
        writer.write_round(TRACK, "naive", 1, number, {"runs": [run_row()], "ranks": rank_rows()})
    results = load(bucket)
    assert len(results.runs) == 2
    assert len(results.ranks) == 4
    assert results.summary().tokens_per_s[0] == 10_000.0
    assert completed_rounds(bucket, "s") == {(TRACK, "naive", 0), (TRACK, "naive", 1)}
    assert [suite.request for suite in suites(bucket)] == [{"tracks": []}]


def test_an_empty_bucket_and_a_missing_one_are_one_message(bucket: str) -> None:
    with pytest.raises(StoreError, match=r"s3://bench-\w+/some/results"):
        load(bucket)
    missing = bucket.replace("bench-", "nowhere-")
    with pytest.raises(StoreError, match=r"s3://nowhere-\w+/some/results") as caught:
        Writer(missing, "s").check()
    assert "endpoint" not in str(caught.value).split("(")[0]


def test_messages_hold_no_secrets() -> None:
    folder = open_folder("s3://user:password@bench/results?region=us-east-1&scheme=http")
    assert str(folder) == "s3://bench/results"
