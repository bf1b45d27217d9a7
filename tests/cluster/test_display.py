"""What people see of a start."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.cluster_info import ClusterInfo
from cluster.display import startup_table
from cluster.events import WORKERS_PHASE, Phase, WorkerInfo


def test_each_worker_says_where_the_time_of_its_start_went() -> None:
    worker = WorkerInfo(worker_id="decode-0", role="decode", address="", pid=1, startup={"model": 1.25, "imports": 2.5})
    info = ClusterInfo(
        grpc="",
        http="",
        redis="",
        head="",
        workers=(worker,),
        startup=(Phase(name=WORKERS_PHASE, start_s=0.0, end_s=4.0),),
        router_startup={},
        total_s=4.0,
    )
    page = io.StringIO()
    Console(file=page, width=120).print(startup_table(info))
    assert "decode-0: model" in page.getvalue()
    assert "2.5 s" in page.getvalue()
