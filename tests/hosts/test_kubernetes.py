"""The manifest of the README against what Kubernetes' objects of these kinds must have."""

import pathlib
import re

import pytest

import pipemesh.hosts
from pipemesh.hosts import Cluster

yaml = pytest.importorskip("yaml")
PATH = pathlib.Path(pipemesh.hosts.__file__).with_name("kubernetes.yaml")
VERSIONS = {
    "Service": "v1",
    "StatefulSet": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Job": "batch/v1",
}
# What the API refuses an object of a kind without, and what it may have besides.
FIELDS = {
    "Service": ({"selector", "ports"}, {"clusterIP", "publishNotReadyAddresses"}),
    "StatefulSet": ({"serviceName", "selector", "template"}, {"replicas", "podManagementPolicy"}),
    "NetworkPolicy": ({"podSelector"}, {"policyTypes", "ingress"}),
    "Job": ({"template"}, {"backoffLimit"}),
}
POD = {"containers", "restartPolicy", "volumes"}
CONTAINER = {"name", "image", "command", "ports", "resources", "volumeMounts"}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@pytest.fixture(scope="module")
def objects():
    found = list(yaml.safe_load_all(PATH.read_text(encoding="utf-8")))
    return {each["kind"]: each for each in found}


def test_objects_have_the_fields_of_their_kind(objects):
    assert objects.keys() == VERSIONS.keys()
    for kind, found in objects.items():
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        assert found["apiVersion"] == VERSIONS[kind]
        assert NAME.fullmatch(found["metadata"]["name"])
        needed, more = FIELDS[kind]
        assert needed <= set(found["spec"]) <= needed | more
    assert objects["Job"]["spec"]["template"]["spec"]["restartPolicy"] in ("OnFailure", "Never")


def test_pods_have_containers_whose_volumes_are_there(objects):
    for kind in ("StatefulSet", "Job"):
        spec = objects[kind]["spec"]["template"]["spec"]
        assert set(spec) <= POD
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        for container in spec["containers"]:
            assert {"name", "image", "command"} <= set(container) <= CONTAINER
            assert NAME.fullmatch(container["name"])
            assert all(isinstance(word, str) for word in container["command"])
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


def test_names_and_labels_go_together(objects):
    service, workers, policy, job = (objects[kind] for kind in VERSIONS)
    labels = workers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert workers["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert workers["spec"]["serviceName"] == service["metadata"]["name"]
    members = policy["spec"]["podSelector"]["matchLabels"].items()
    for each in (workers, job):
        assert members <= each["spec"]["template"]["metadata"]["labels"].items()
    (rule,) = policy["spec"]["ingress"]
    assert [peer["podSelector"]["matchLabels"].items() for peer in rule["from"]] == [members]


def test_the_client_names_every_worker(objects):
    service, workers, _, job = (objects[kind] for kind in VERSIONS)
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    (text,) = [word for word in words if word.startswith("--cluster=")]
    name, domain = workers["metadata"]["name"], service["metadata"]["name"]
    (port,) = [each["port"] for each in service["spec"]["ports"]]
    assert Cluster.from_text(text.removeprefix("--cluster=")).workers == tuple(
        f"{name}-{i}.{domain}:{port}" for i in range(workers["spec"]["replicas"])
    )
    worker = workers["spec"]["template"]["spec"]["containers"][0]
    assert f"--port={port}" in worker["command"]
