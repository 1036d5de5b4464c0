"""`--results s3://…` from the first round to the report, against an S3 server that checks signatures and rights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pandas as pd
import pytest
import requests
from moto.iam.access_control import S3AccessDeniedError, S3IAMRequest
from moto.server import ThreadedMotoServer

from raybench.results.schema import TABLES
from tests.clusters.leaks import in_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BUCKET, FOLDER = "bench", "team/results"
MEASURE = ["a:bucketed", "--scale", "smoke", "--steps", "2", "--warmup", "1", "--repeats", "2"]
DENIED = "access denied: give credentials that may list, read and write here (AWS_ACCESS_KEY_ID and "
RIGHTS = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


@dataclass
class Store:
    """A bucket, and somebody whose home has the key to it."""

    client: Any
    query: str
    key: str
    secret: str
    home: Path

    def uri(self, place: str = f"{BUCKET}/{FOLDER}") -> str:
        return f"s3://{place}?{self.query}"

    def raybench(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        command = [sys.executable, "-m", "raybench", *arguments]
        mine = {**path, "HOME": str(self.home), "AWS_EC2_METADATA_DISABLED": "true", **environment}
        return subprocess.run(command, env=mine, cwd=self.home, capture_output=True, text=True, timeout=240)

    def names(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [item["Key"] for item in listed if item["Size"]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    signed = S3IAMRequest.__init__
    encodings: set[str | None] = set()

    def refuse_unsigned(self: S3IAMRequest, **request: Any) -> None:
        """As S3 does; moto would fall over it."""
        if "Authorization" not in request["headers"]:
            raise S3AccessDeniedError
        encodings.add(request["headers"].get("Content-Encoding"))
        signed(self, **request)

    monkeypatch.setattr(S3IAMRequest, "__init__", refuse_unsigned)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    root = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    root |= {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
    try:
        requests.post(f"{endpoint}/moto-api/reset", timeout=10)
        iam = boto3.client("iam", **root)
        iam.create_user(UserName="bench")
        iam.put_user_policy(UserName="bench", PolicyName="rights", PolicyDocument=json.dumps(RIGHTS))
        made = iam.create_access_key(UserName="bench")["AccessKey"]
        key, secret = made["AccessKeyId"], made["SecretAccessKey"]
        boto3.client("s3", **root).create_bucket(Bucket=BUCKET)
        requests.post(f"{endpoint}/moto-api/reset-auth", data="0", timeout=10)  # from here on nobody else gets in
        (tmp_path / ".aws").mkdir()
        credentials = tmp_path / ".aws" / "credentials"
        credentials.touch(mode=0o600)
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        client = boto3.client("s3", **{**root, "aws_access_key_id": key, "aws_secret_access_key": secret})
        query = f"scheme=http&endpoint_override={host}%3A{port}&region=us-east-1"
        yield Store(client, query, key, secret, tmp_path)
        assert "aws-chunked" not in encodings  # Oracle's object storage does not take it
    finally:
        requests.post(f"{endpoint}/moto-api/reset-auth", data="inf", timeout=10)
        server.stop()


def readable(folder: Path, secret: str) -> list[Path]:
    """Files below a folder that hold the secret."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_suite_in_a_bucket(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["run", *MEASURE, "--results", store.uri()]
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as ray:  # a short name, for Ray's sockets
        keys = {"AWS_ACCESS_KEY_ID": store.key, "AWS_SECRET_ACCESS_KEY": store.secret, "RAY_TMPDIR": ray}
        done = store.raybench(*command, **keys)
        assert done.returncode == 0, done.stderr
        assert list(Path(ray).glob("*/logs/*"))
        assert readable(Path(ray), store.secret) == []
    (suite,) = re.findall(rf"^suite (\S+): rows in s3://{BUCKET}/{FOLDER}$", done.stdout, re.M)

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(store.home / ".aws" / "credentials"))
    runs = pd.read_parquet(store.uri(f"{BUCKET}/{FOLDER}/runs"))
    assert sorted(zip(runs.suite_id, runs["round"], runs.attempt, strict=True)) == [(suite, 1, 1), (suite, 2, 1)]
    assert (set(runs.status), set(runs.gate)) == ({"ok"}, {"passed"})

    told = store.raybench("report", store.uri(), "-o", "told")
    assert told.returncode == 0, told.stderr
    assert {"report.html", "BENCHMARK_SUMMARY.md"} <= {path.name for path in (store.home / "told").iterdir()}
    assert "bucketed" in (store.home / "told" / "BENCHMARK_SUMMARY.md").read_text()

    # As if the driver had been killed just before the second round was complete: its row in `runs` comes last.
    (second,) = [name for name in store.names() if name.startswith(f"{FOLDER}/runs/") and name.endswith("-2.parquet")]
    store.client.delete_object(Bucket=BUCKET, Key=second)
    again = store.raybench(*command, "--resume")
    assert again.returncode == 0, again.stderr
    assert f"suite {suite}: rows in s3://{BUCKET}/{FOLDER}" in again.stdout
    assert re.findall(r"bucketed round (\d):", again.stderr) == ["2"]
    runs = pd.read_parquet(store.uri(f"{BUCKET}/{FOLDER}/runs"))
    assert sorted(zip(runs.suite_id, runs["round"], runs.attempt, strict=True)) == [(suite, 1, 1), (suite, 2, 2)]

    said = "".join(one.stdout + one.stderr for one in (done, told, again))
    assert store.secret not in said
    assert store.key not in said
    assert readable(store.home, store.secret) == [store.home / ".aws" / "credentials"]
    tables = {table: pd.read_parquet(store.uri(f"{BUCKET}/{FOLDER}/{table}")) for table in TABLES}
    assert in_rows(tables, [store.secret, store.key]) == []


@pytest.mark.parametrize(
    ("place", "environment", "words"),
    [
        ("nowhere/x", {}, "there is no such bucket: make it, or check its name"),
        ("bench/x", {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}, DENIED),
        ("bench/x", {"AWS_ACCESS_KEY_ID": "AKIASTRANGER", "AWS_SECRET_ACCESS_KEY": "hidden"}, DENIED),
        ("bench/x", {"AWS_ACCESS_KEY_ID": "{key}", "AWS_SECRET_ACCESS_KEY": "hidden"}, DENIED),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_bucket_is_one_message_before_anything_starts(
    store: Store, place: str, environment: dict[str, str], words: str
) -> None:
    environment = {name: value.format(key=store.key) for name, value in environment.items()}
    failed = store.raybench("run", *MEASURE, "--results", store.uri(place), **environment)
    assert (failed.returncode, failed.stdout) == (2, "")
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"raybench: results s3://{place}: cannot be ")
    assert words in line
    assert "hidden" not in line
    assert store.names() == []
