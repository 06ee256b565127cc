"""The attacks: bodies of programs that print `ESCAPED` when something outside yields.

`PID` is a process outside, `FILE` a file and `FOLDER` its folder; `PORT` and `SOCKET` listen. A
body ends at its first error; those that only try to outlive their limits print nothing.
"""

from types import MappingProxyType
from typing import Final

PRELUDE: Final = """
import ctypes, fcntl, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what):
    print("ESCAPED", what, flush=True)
def raw(name, number, *arguments):
    if os.uname().machine == "x86_64" and libc.syscall(number, *arguments) >= 0:
        escaped(name)
"""

_SIGNALS: Final = {
    "kill": "for n in (1, 2, 9, 15, 19): os.kill(PID, n); escaped('kill')",
    "killpg": "os.killpg(PID, 9); escaped('killpg')",
    "kill the supervisor": "os.kill(os.getppid(), 9)",
    "stop the supervisor": "os.kill(os.getppid(), 19)",
    "pidfd": "raw('pidfd_open', 434, PID, 0)",
    "tgkill": "raw('tgkill', 234, PID, PID, 9)",
    "sigqueue": "raw('rt_sigqueueinfo', 129, PID, 9, bytes(128))",
    "F_SETOWN": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, PID)
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b"x")
""",
    "F_SETOWN of a group": """
a, b = socket.socketpair()
fcntl.fcntl(a, fcntl.F_SETOWN, -PID)
fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
b.send(b"x")
""",
    "F_SETOWN_EX": """
r, w = os.pipe()
fcntl.fcntl(r, 15, struct.pack("ii", 1, PID))
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b"x")
""",
    "FIOSETOWN": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8901, struct.pack("i", PID))
fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
b.send(b"x")
""",
    "SIOCSPGRP": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8902, struct.pack("i", PID))
fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
b.send(b"x")
""",
    "lease": "fcntl.fcntl(os.open(__file__, 0), 1024, 0)",
}
_PROCESSES: Final = {
    "nice": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
    "nice of a group": "os.setpriority(os.PRIO_PGRP, PID, 19)",
    "affinity": "os.sched_setaffinity(PID, [0])",
    "scheduler": "os.sched_setscheduler(PID, os.SCHED_IDLE, os.sched_param(0))",
    "sched_setattr": "raw('sched_setattr', 314, PID, struct.pack('IIQ', 48, 5, 0) + bytes(32), 0)",
    "ioprio": "raw('ioprio_set', 251, 1, PID, 3 << 13)",
    "prlimit": "resource.prlimit(PID, resource.RLIMIT_NOFILE, (3, 3)); escaped('prlimit')",
    "ptrace": "libc.ptrace(16, PID, 0, 0) == 0 and escaped('ptrace')",
    "process_vm_readv": "raw('process_vm_readv', 310, PID, None, 0, None, 0, 0)",
    "memory": "open(f'/proc/{PID}/mem', 'rb'); escaped('mem')",
    "environment of another": "open(f'/proc/{PID}/environ', 'rb').read(1); escaped('environ')",
    "descriptors of another": "os.listdir(f'/proc/{PID}/fd'); escaped('fd')",
    "kcmp": "raw('kcmp', 312, PID, PID, 0, 0, 0)",
    "secret": "'HEDDLE_CAMPAIGN_SECRET' in os.environ and escaped('environment')",
    "inherited": """
for n in range(3, 64):
    try:
        target = os.readlink(f"/proc/self/fd/{n}")
    except OSError:
        continue
    if "heddle-attack" in target:
        escaped(target)
""",
}
_FILES: Final = {
    "read": "open(FILE).read(); escaped('read')",
    "write": "open(FILE, 'a').write('x'); escaped('write')",
    "truncate": "os.truncate(FILE, 0); escaped('truncate')",
    "remove": "os.remove(FILE); escaped('remove')",
    "rename": "os.rename(FILE, FILE + 'x'); escaped('rename')",
    "link": "os.link(FILE, 'x'); escaped('link')",
    "chmod": "os.chmod(FILE, 0o777); escaped('chmod')",
    "chown": "os.chown(FILE, os.getuid(), os.getgid()); escaped('chown')",
    "utime": "os.utime(FILE, (0, 0)); escaped('utime')",
    "xattr": "os.setxattr(FILE, b'user.x', b'x'); escaped('xattr')",
    "symlink": "os.symlink(FILE, 'l'); open('l').read(); escaped('symlink')",
    "parents": "open('../' * 20 + FILE.lstrip('/')).read(); escaped('parents')",
    "root of proc": "open('/proc/self/root' + FILE).read(); escaped('root')",
    "cwd of proc": "open(f'/proc/{os.getppid()}/cwd/x', 'w'); escaped('cwd')",
    "open_tree": "raw('open_tree', 428, -100, FOLDER.encode(), 0)",
    "handle": "raw('open_by_handle_at', 304, -100, bytes(64), 0)",
    "new file": "open(FOLDER + '/new', 'w'); escaped('new file')",
    "new folder": "os.mkdir(FOLDER + '/new'); escaped('mkdir')",
    "list": "os.listdir(FOLDER); escaped('list')",
    "device": "os.mknod('d', 0o20666, 257); open('d', 'rb').read(1); escaped('device')",
    "interpreter": "open(os.__file__, 'a'); escaped('interpreter')",
    "tty": "open('/dev/tty', 'w').write('x'); escaped('tty')",
    "kernel": "open('/proc/sys/kernel/core_pattern', 'w'); escaped('core_pattern')",
    "cgroup": "open('/sys/fs/cgroup/cgroup.procs', 'w'); escaped('cgroup')",
    "inotify": "raw('inotify_add_watch', 254, libc.inotify_init(), FOLDER.encode(), 0xfff)",
}
_NETWORK: Final = {
    "tcp": "socket.create_connection(('127.0.0.1', PORT), 5).send(b'x'); escaped('tcp')",
    "udp": "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT)); escaped('udp')",
    "unix": "s = socket.socket(1, 1); s.connect(SOCKET); s.send(b'x'); escaped('unix')",
    "abstract": "s = socket.socket(1, 1); s.connect('\\0' + SOCKET); escaped('abstract')",
    "netlink": "socket.socket(16, 3, 0); escaped('netlink')",
    "packet": "socket.socket(17, 3, 0); escaped('packet')",
    "sctp": "socket.socket(2, 1, 132); escaped('sctp')",
    "vsock": "socket.socket(40, 1); escaped('vsock')",
    "io_uring": "raw('io_uring_setup', 425, 8, bytes(256))",
    "x32": "raw('x32 socket', 0x40000000 + 41, 2, 1, 0)",
}
_PRIVILEGES: Final = {
    "user namespace": "libc.unshare(0x10000000) == 0 and escaped('user')",
    "net namespace": "libc.unshare(0x40000000) == 0 and escaped('net')",
    "setns": "libc.setns(os.open('/proc/1/ns/net', 0), 0) == 0 and escaped('setns')",
    "mount": "libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0 and escaped('mount')",
    "umount": "libc.umount2(b'/', 2) == 0 and escaped('umount')",
    "pivot": "raw('pivot_root', 155, b'.', b'.')",
    "chroot": "libc.chroot(b'.') == 0 and escaped('chroot')",
    "bpf": "raw('bpf', 321, 0, bytes(128), 128)",
    "perf": "raw('perf_event_open', 298, bytes(128), 0, -1, -1, 0)",
    "userfaultfd": "raw('userfaultfd', 323, 1)",
    "keys": "raw('add_key', 248, b'user', b'x', b'x', 1, -4)",
    "shared memory": "libc.shmget(4242, 4096, 0o1600) >= 0 and escaped('shm')",
    "queue": "libc.msgget(4242, 0o1600) >= 0 and escaped('msg')",
    "memfd": "raw('memfd_create', 319, b'x', 0)",
    "module": "raw('init_module', 175, b'', 0, b'')",
    "limits": """
for n in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    soft, hard = resource.getrlimit(n)
    resource.setrlimit(n, (soft, hard + 1))
    escaped('limit')
""",
}
_OUTLIVING: Final = {
    "no death signal": "libc.prctl(1, 0); os.kill(os.getppid(), 9); time.sleep(1000)",
    "death signal alone": "libc.prctl(1, 0); time.sleep(1000)",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
""",
    "daemon that ignores": """
for n in range(1, 32):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
time.sleep(1000)
""",
    "fork bomb": "while True:\n    os.fork()",
    "subreaper": "libc.prctl(36, 1)\nif os.fork() == 0: os.fork() or time.sleep(1000)",
    "threads": """
import threading
while True:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
""",
    "spin": "while True: pass",
    "flood": "while True: os.write(1, b'x' * 65536)",
    "flood of errors": "while True: os.write(2, b'x' * 65536)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "disk": "n = 0\nwhile True:\n    open(str(n), 'wb').write(b'x' * (1 << 20)); n += 1",
    "depth": "while True:\n    os.mkdir('d'); os.chdir('d')",
    "closed output": "os.close(1); os.close(2); time.sleep(1000)",
    "stopped": "os.kill(os.getpid(), 19)",
    "group": "os.setsid(); time.sleep(1000)",
}
ATTACKS: Final = MappingProxyType(
    {
        f"{kind}: {name}": body
        for kind, bodies in (
            ("signals", _SIGNALS),
            ("processes", _PROCESSES),
            ("files", _FILES),
            ("network", _NETWORK),
            ("privileges", _PRIVILEGES),
            ("outliving", _OUTLIVING),
        )
        for name, body in bodies.items()
    }
)


def program(name: str, **outside: object) -> str:
    """Return the source of an attack on what is outside: PID, FILE, FOLDER, PORT and SOCKET."""
    given = "\n".join(f"{key} = {value!r}" for key, value in outside.items())
    body = "\n".join(f"    {line}" for line in ATTACKS[name].strip("\n").splitlines())
    errors = "(OSError, ValueError, OverflowError, MemoryError, RuntimeError, AttributeError)"
    return f"{PRELUDE}\n{given}\ntry:\n{body}\nexcept {errors}:\n    pass\n"
