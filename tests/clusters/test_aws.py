"""`aws-a10g.yaml` against a local EC2 (moto's server): Ray's provider makes what the file says, and takes it away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.clusters.conftest import ROOT


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    monkeypatch.setattr("ray.autoscaler._private.aws.config.time.sleep", lambda _: None)  # it waits for IAM to settle
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield boto3.client("ec2", region_name="us-east-1")
    server.stop()


@pytest.mark.slow
def test_a_node_comes_and_goes(aws: Any) -> None:
    config = yaml.safe_load((ROOT / "clusters" / "aws-a10g.yaml").read_text())
    image = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    kinds = config["available_node_types"]
    assert {kind["node_config"]["ImageId"] for kind in kinds.values()} == {image}
    for kind in kinds.values():  # EC2 itself looks the name up; moto does not
        kind["node_config"]["ImageId"] = aws.describe_images()["Images"][0]["ImageId"]
    config = AWSNodeProvider.fillout_available_node_types_resources(prepare_config(config))
    validate_config(config)
    config = AWSNodeProvider.bootstrap_config(config)

    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    head = config["available_node_types"][config["head_node_type"]]
    tags = {"ray-node-type": "head", "ray-node-name": "ray-raybench-a10g-head", "ray-user-node-type": "a10g"}
    provider.create_node(head["node_config"], tags, 1)
    (node,) = provider.non_terminated_nodes({"ray-node-type": "head"})
    instance = aws.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
    assert instance["InstanceType"] == "g5.12xlarge"
    volumes = aws.describe_volumes()["Volumes"]
    assert [volume["Size"] for volume in volumes] == [200]

    groups = [group["GroupId"] for group in instance["SecurityGroups"]]
    rules = aws.describe_security_groups(GroupIds=groups)["SecurityGroups"]
    to_the_world = [
        (rule.get("FromPort"), rule.get("ToPort"))
        for group in rules
        for rule in group["IpPermissions"]
        if any(block["CidrIp"] == "0.0.0.0/0" for block in rule.get("IpRanges", []))
    ]
    assert to_the_world == [(22, 22)]

    provider.terminate_nodes([node])
    assert provider.non_terminated_nodes({}) == []
    assert aws.describe_volumes()["Volumes"] == []
