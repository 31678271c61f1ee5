"""Put this folder on PYTHONPATH and two ranks of torchrun share one GPU over NCCL.

NCCL refuses two ranks on one GPU of one host, so each rank says that it is a host of its own and talks through
sockets on loopback. What is computed is what two GPUs compute, on real streams; times mean nothing, as ranks take
turns.
"""

import os

if {"RANK", "LOCAL_RANK"} <= os.environ.keys():
    os.environ.update(
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        NCCL_HOSTID="host" + os.environ["RANK"],
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
    )
