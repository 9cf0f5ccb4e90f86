"""A delay line between a host's cable and the bridge, for kernels without netem: `relay.py PORT SECONDS` in the switch."""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time

# linux/if_tun.h: TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_VNET_HDR. The virtio header in front of each frame keeps checksum and
# segmentation offload working through the relay.
TUNSETIFF, TAP, NO_PI, VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000
# linux/if_packet.h
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR, PACKET_MR_PROMISC, PACKET_OUTGOING = 263, 1, 15, 1, 4
ALL_PROTOCOLS = 3


def main(port: str, delay_s: float) -> None:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", f"t{port}".encode(), TAP | NO_PI | VNET_HDR))
    for command in (f"ip link set p{port} nomaster", f"ip link set t{port} master br0 up"):
        subprocess.run(command.split(), check=True, timeout=10)
    cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    cable.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    promiscuous = struct.pack("iHH8x", socket.if_nametoindex(f"p{port}"), PACKET_MR_PROMISC, 0)
    cable.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, promiscuous)
    cable.bind((f"p{port}", ALL_PROTOCOLS))
    cable.setblocking(False)
    print("ready", flush=True)
    relay(tap, cable, delay_s)


def relay(tap: int, cable: socket.socket, delay_s: float) -> None:
    waiting: list[tuple[float, int, bool, bytes]] = []
    number = 0
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([tap, cable], [], [], left_s)[0]:
            try:
                for _ in range(64):
                    if source is cable:
                        frame, (_, _, kind, *_) = cable.recvfrom(70000)
                        if kind == PACKET_OUTGOING:
                            continue
                    else:
                        frame = os.read(tap, 70000)
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + delay_s, number, source is cable, frame))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to_tap, frame = heapq.heappop(waiting)
            try:
                if to_tap:
                    os.write(tap, frame)
                else:
                    cable.send(frame)
            except OSError:
                continue  # a full queue drops the frame, as a real one would


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
