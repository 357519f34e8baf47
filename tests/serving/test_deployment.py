"""Container and Kubernetes files agree with the servers; Triton's side is asked in `test_triton.py`."""

from __future__ import annotations

import httpx2

from dflash_trt.serving.openai.limits import ServerOptions
from tests.serving import deployment
from tests.serving.conftest import Served


def test_the_openai_image_asks_where_the_server_answers(served: Served) -> None:
    stage = deployment.stage("openai")
    assert stage.ports == (stage.asked_port,) == (ServerOptions().port,)
    answer = httpx2.get(f"{served.url}{stage.asked_path}")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_names_and_ports_agree() -> None:
    service, ports = deployment.documents()["Service"]["spec"], deployment.ports()
    assert deployment.stage("triton").ports == tuple(ports.values())
    assert {p["name"]: p["port"] for p in service["ports"]} == ports
    assert all(p["targetPort"] == p["name"] for p in service["ports"])
    pod = deployment.documents()["Deployment"]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    mounts = {m["name"]: m["mountPath"] for m in deployment.container()["volumeMounts"]}
    assert f"--model-repository={mounts['models']}" in deployment.container()["args"]
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == set(mounts)
