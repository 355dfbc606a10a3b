"""Runs one untrusted program in namespaces of its own, and ends all of it once it exceeds a bound. This module is a program:

    python -I jail.py enter      '{...}'    makes the namespaces, and goes on as `supervise` in them
    python -I jail.py supervise  '{...}'    is process 1 of namespaces that somebody else (bubblewrap) has made

There are three processes: the one outside, which maps the user and passes on the exit code; process 1 inside, which builds the file system,
starts the program, adds up what all processes hold, and kills them when it ends; and the program, an ordinary user without any capability.
The program's root is a small tmpfs with the system's folders in it, read-only: it can read nothing else of the machine, and the size of the
tmpfs is all the disk it has. The way it ended is reported on descriptor `report`, which the program does not have.

This module imports nothing of ours, so that it starts in milliseconds and the program can find nothing in its memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

LOOK_EVERY_S = 0.01
"""Seconds between two sums of what the call holds. A longer time lets it go further beyond its bound; a shorter one costs more than a
hundredth of a core."""
INSIDE_ID = 65534
"""User and group id of the program inside; where root starts it, outside too, because the kernel applies no process limit to root."""
FIRST_KERNEL_WITH_LIMITS_PER_NAMESPACE = (5, 14)
"""First kernel version in which RLIMIT_NPROC does not count all processes of the user on the machine."""

_NEW_SPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mount, IPC, UTS, user, PID and network."""
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY_NOSUID_NODEV = 442, -100, 0x8000, 1 | 2 | 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_DEVICES = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the call that the JSON in the second argument describes; see `code.run_python` for its keys."""
    call = json.loads(sys.argv[2])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_inheritable(call["report"], False)
    if sys.argv[1] == "enter":
        _enter(call)
    else:
        _become_supervisor(call)


def _enter(call: dict[str, Any]) -> NoReturn:
    """Fork into new namespaces, map the user, and exit with the exit code of process 1."""
    ready, is_ready = os.pipe()
    mapped, is_mapped = os.pipe()
    child = os.fork()
    if not child:
        _reported(call, _unshared, call, is_ready, mapped)
    os.close(is_ready)
    if os.read(ready, 1):
        _reported(call, _map_user, child, goes_on=True)
        os.write(is_mapped, b"x")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def _map_user(process_id: int) -> None:
    """Map users into the new user namespace. Root maps a second one, for the program; another user can only map itself."""
    user, group = os.geteuid(), os.getegid()
    both = f"\n{INSIDE_ID} {INSIDE_ID} 1" if user == 0 else ""
    inside = 0 if user == 0 else INSIDE_ID
    if user != 0:
        _write(f"/proc/{process_id}/setgroups", "deny")
    _write(f"/proc/{process_id}/uid_map", f"{inside} {user} 1{both}")
    _write(f"/proc/{process_id}/gid_map", f"{inside} {group} 1{both}")


def _unshared(call: dict[str, Any], is_ready: int, mapped: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _check(_libc.unshare(_NEW_SPACES), "unshare")
    os.write(is_ready, b"x")
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not os.read(mapped, 1):
        os._exit(1)
    child = os.fork()  # process 1 of the new PID namespace
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _build_root(call)
    _become_supervisor(call)


def _build_root(call: dict[str, Any]) -> None:
    """Make a tmpfs with the system's folders in it the root; everything that was mounted before is gone."""
    with open(call["program"], "rb") as file:
        program = file.read()
    root = call["root"]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={call['disk_bytes']},nr_inodes={call['max_files']},mode=0755")
    for path in call["seen"]:
        _show(path, root)
    for name in ("proc", "dev", "old"):
        os.mkdir(f"{root}/{name}")
    for name in _DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _MS_BIND)
    _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    for name in ("work", "tmp", "dev/shm"):
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", 0o1777)
    with open(f"{root}/work/program.py", "wb") as file:
        file.write(program)
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", _MNT_DETACH), "umount")
    os.rmdir("/old")
    _write("/proc/sys/user/max_user_namespaces", "0")  # in a user namespace of its own, a program would have every capability again


def _show(path: str, root: str) -> None:
    """Mount a folder or file of the system at its own path in the new root, read-only with all that is mounted in it."""
    if not os.path.lexists(path) or os.path.lexists(f"{root}{path}"):
        return
    os.makedirs(os.path.dirname(f"{root}{path}"), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), f"{root}{path}")
        return
    if os.path.isdir(path):
        os.mkdir(f"{root}{path}")
    else:
        os.close(os.open(f"{root}{path}", os.O_CREAT | os.O_WRONLY))
    _mount(path, f"{root}{path}", None, _MS_BIND | _MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    target = f"{root}{path}".encode()
    done = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, ctypes.c_char_p(target), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32)
    )
    _check(done, f"mount_setattr {path}")


def _become_supervisor(call: dict[str, Any]) -> NoReturn:
    """Start the program as process 1, and end once the program has ended or the whole call exceeds a bound; that ends all processes."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program, which may be the same user, can neither trace nor read this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    runs, its_end = os.pipe()  # not inherited: closed once the program runs
    program = os.fork()
    if not program:
        _reported(call, _become_program, call)
    os.close(its_end)
    os.read(runs, 1)  # until then the child is a copy of this process, whose /proc entries cannot be read
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_EVERY_S)
        if (status := _reap(program)) is not None:
            _report(call, exit_code=os.waitstatus_to_exitcode(status))
        try:
            over = _over(call)
        except Exception as error:  # whatever keeps this process from looking is the program's doing
            over = f"its bounds could not be seen to: {error}"
        if over is not None:
            _report(call, exit_code=-signal.SIGKILL, over=over)


def _reap(program: int) -> int | None:
    """Reap the processes that have ended, and return the program's status once it has ended, else None."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            return status
        if not ended:
            return None


def _over(call: dict[str, Any]) -> str | None:
    """Return the bound that the processes of this namespace, without this one, exceed; None where they exceed none."""
    others = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    num_tasks = sum(_num_threads(name) for name in others)
    if num_tasks > call["max_processes"]:
        return f"{num_tasks} processes and threads, at most {call['max_processes']}"
    unmapped = sum(_unmapped_of(name) for name in others) + _shared_segments()
    if sum(_resident_of(name) for name in others) + unmapped <= call["memory_bytes"]:
        return None
    num_bytes = sum(_own_share_of(name) for name in others) + unmapped
    return f"{num_bytes} bytes of memory, at most {call['memory_bytes']}" if num_bytes > call["memory_bytes"] else None


def _num_threads(name: str) -> int:
    try:
        return len(os.listdir(f"/proc/{name}/task"))
    except OSError:  # it has ended meanwhile
        return 0


def _resident_of(name: str) -> int:
    """Return the bytes of memory that this process uses, including shared memory: at least its own share, and quickly read."""
    try:
        with open(f"/proc/{name}/status", "rb") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith((b"VmRSS:", b"VmSwap:")))
    except OSError:  # as above
        return 0


def _own_share_of(name: str) -> int:
    """Return this process's own share of memory in bytes: memory that forked processes share is counted once, divided among them."""
    try:
        with open(f"/proc/{name}/smaps_rollup", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines()[1:])
    except PermissionError:
        return _resident_of(name)
    except OSError:  # as above
        return 0
    return sum(int(lines[field].split()[0]) << 10 for field in (b"Pss_Anon", b"Pss_Shmem", b"Swap") if field in lines)


def _unmapped_of(name: str) -> int:
    """Return the bytes of nameless files (memfd) that the process holds open: they are memory, but counted for no process."""
    num_bytes = 0
    try:
        for descriptor in os.listdir(f"/proc/{name}/fd"):
            if os.readlink(f"/proc/{name}/fd/{descriptor}").startswith("/memfd:"):
                num_bytes += os.stat(f"/proc/{name}/fd/{descriptor}").st_blocks * 512
    except PermissionError:
        raise PermissionError(f"process {name} hides what it holds") from None
    except OSError:  # as above
        pass
    return num_bytes


def _shared_segments() -> int:
    """Return the bytes of all System V shared memory, mapped by a process or not."""
    with open("/proc/sysvipc/shm", "rb") as file:
        header, *rows = [line.split() for line in file]
    return sum(int(row[header.index(b"rss")]) for row in rows)


def _become_program(call: dict[str, Any]) -> None:
    """Limit this process, give up every privilege that an ordinary user does not have, and become the program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.nice(5)  # so that the supervisor gets to run beside it
    for name, value in call["limits"].items():
        lower_limit(getattr(resource, name), value)
    if _kernel() >= FIRST_KERNEL_WITH_LIMITS_PER_NAMESPACE:
        lower_limit(resource.RLIMIT_NPROC, call["max_processes"])
    os.chdir("/work")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    os.execve(call["command"][0], call["command"], call["environment"])


def lower_limit(limit: int, value: int) -> None:
    """Lower a limit of this process (`resource.RLIMIT_...`) for good, to `value` or to where it may be raised at most."""
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def _reported(call: dict[str, Any], step: Any, *arguments: Any, goes_on: bool = False) -> None:
    """Run one step of the setup; an error in it is reported as the jail's, not as the program's."""
    try:
        step(*arguments)
    except Exception as error:  # the boundary of this process: any error is reported to the other side
        _report(call, error=f"{type(error).__name__}: {error}")
    if not goes_on:
        os._exit(1)


def _report(call: dict[str, Any], **said: Any) -> NoReturn:
    os.write(call["report"], f"{json.dumps(said)}\n".encode())
    os._exit(0 if "exit_code" in said else 1)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def _check(returned: int, what: str) -> None:
    if returned:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
