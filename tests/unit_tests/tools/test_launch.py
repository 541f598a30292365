"""tools/launch.py: what its processes are told, how they end, and that none is left."""

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

LAUNCH = Path(__file__).parents[3] / "tools" / "launch.py"
SECONDS = 60

ENVIRONMENT = """
import json, os, stat, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
told = {name: os.environ[name] for name in names}
told["store"] = store = os.environ["MEGATRON_STORE_FILE"]
told["mode"] = stat.S_IMODE(os.stat(os.path.dirname(store)).st_mode)
told["argv"] = sys.argv[1:]
sys.stdout.write(json.dumps(told) + "\\n")
"""

WAITING = """
import os, signal, sys, time
rank = os.environ["RANK"]
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(number))
sys.stdout.write(f"here {rank} {os.getpid()}\\n")
while not got:
    time.sleep(0.01)
time.sleep(0.3)  # for a second one, should it come
sys.stdout.write(f"rank {rank} got {list(map(int, got))}\\n")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`start(source, *flags, processes=…)`: the launcher with a script of that source."""
    running = []

    def launch(source: str, *flags: str, processes: int = 2, **options) -> subprocess.Popen:
        script = tmp_path / "script.py"
        script.write_text(source)
        process = subprocess.Popen(
            [sys.executable, LAUNCH, f"--processes={processes}", script, *flags],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        running.append(process)
        return process

    yield launch
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start) -> Callable[..., tuple[int, list[str], str]]:
    """`run(source, *flags, processes=…)`: exit code, lines of output, and errors."""

    def run(*args, **options) -> tuple[int, list[str], str]:
        process = start(*args, **options)
        out, errors = process.communicate(timeout=SECONDS)
        return process.returncode, out.splitlines(), errors

    return run


def await_all(process: subprocess.Popen) -> list[int]:
    """Wait until both processes of `WAITING` listen to signals; their ids."""
    return [int(process.stdout.readline().split()[2]) for _ in range(2)]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_process_is_told_who_it_is_and_where_to_meet(run, tmp_path):
    code, lines, errors = run(ENVIRONMENT, "--help", "x y", processes=3)
    assert (code, errors) == (0, "")
    told = sorted((json.loads(line) for line in lines), key=lambda each: each["RANK"])
    assert [each["RANK"] for each in told] == ["0", "1", "2"]
    for each in told:
        assert each["LOCAL_RANK"] == each["RANK"]
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["GROUP_RANK"]) == ("3", "3", "0")
        assert each["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
        assert each["argv"] == ["--help", "x y"]
    (store,) = {each["store"] for each in told}
    assert Path(store).parent.parent == tmp_path


def test_only_this_user_can_open_the_place_to_meet_and_it_is_removed(run, tmp_path):
    _, lines, _ = run(ENVIRONMENT)
    assert {json.loads(line)["mode"] for line in lines} == {stat.S_IRWXU}
    assert [each.name for each in tmp_path.iterdir()] == ["script.py"]


def test_a_process_that_fails_ends_the_others_and_gives_its_exit_code(run):
    source = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(1000)"
    code, _, errors = run(source, processes=3)
    assert (code, errors) == (7, "[launch] a process ended with exit code 7\n")


def test_a_process_that_is_killed_gives_exit_code_1(run):
    source = "import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
    code, _, errors = run(source)
    assert (code, errors) == (1, "[launch] a process ended with exit code -9\n")


def test_the_first_to_fail_counts(run, tmp_path):
    source = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "open(os.environ['RANK'], 'w').close()\n"
        "while not os.path.exists('0'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "time.sleep(1000)"
    )
    assert run(source, cwd=tmp_path)[0] == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("exits", "code"), [("0", 0), ("5", 130)])
def test_a_signal_goes_to_each_process_once(start, number, exits, code):
    process = start(WAITING, exits)
    await_all(process)
    process.send_signal(number)
    out, errors = process.communicate(timeout=SECONDS)
    lines = sorted(out.splitlines())
    stopped = ["[launch] stopped"] if code else []
    assert lines == [*stopped, f"rank 0 got [{int(number)}]", f"rank 1 got [{int(number)}]"]
    assert (process.returncode, errors) == (code, "")


def test_ctrl_c_in_a_terminal_reaches_each_process_once(start):
    terminal, end = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(end), os.O_RDWR))  # the first that a session opens is its own

    process = start(WAITING, "0", preexec_fn=take_terminal, stdin=end)
    os.close(end)
    await_all(process)
    os.write(terminal, b"\x03")
    out, _ = process.communicate(timeout=SECONDS)
    os.close(terminal)
    assert sorted(out.splitlines()) == ["rank 0 got [2]", "rank 1 got [2]"]
    assert process.returncode == 0


def test_processes_that_do_not_end_are_killed(start):
    source = f"import runpy, sys; sys.argv[1:] = ['0']; exec({WAITING!r}.replace('0.3', '1000'))"
    script = f"""
import sys; sys.path.insert(0, {str(LAUNCH.parent)!r})
from launch import run_processes
sys.exit(run_processes(2, ["-c", {source!r}], stop_seconds=0.1))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    ids = await_all(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (130, "[launch] stopped\n")
    assert all(map(gone, ids))


def test_a_launcher_that_is_killed_leaves_no_process(start):
    process = start(WAITING, "0")
    ids = await_all(process)
    process.kill()
    deadline = time.monotonic() + SECONDS
    while not all(map(gone, ids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_process_is_an_error_of_one_sentence(run):
    code, _, errors = run("", processes=0)
    assert code == 2
    assert errors.endswith("error: --processes is 0; give 1 or more\n")


def test_it_needs_nothing_but_the_standard_library():
    script = (
        f"import sys; sys.path.insert(0, {str(LAUNCH.parent)!r}); before = set(sys.modules)\n"
        "import launch; print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names)))"
    )
    out = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert out == "['launch']\n"
