"""Programs that are started warm see, do and end as those that Python starts: tests/warm/__init__.py."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import warm

PROGRAM = """
import json, multiprocessing, os, sys

def square(number, results):
    results.put([number**2, __name__, os.environ["COLOUR"], sys.argv])

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    results = context.Manager().Queue()
    process = context.Process(target=square, args=(3, results))
    process.start()
    process.join()
    seen = {"argv": sys.argv, "file": __file__, "path": sys.path, "folder": os.getcwd(), "input": sys.stdin.read()}
    seen |= {"ours": [name for name in sys.modules if name.startswith(("megatron", "placement", "tests"))]}
    seen |= {"environment": dict(os.environ), "spawned": results.get(), "code": process.exitcode}
    json.dump(seen, sys.stdout)
    print("to stderr", file=sys.stderr)
"""
COLD = [sys.executable, "-u"]


@pytest.fixture
def start():
    command = warm.python()
    if command == COLD:
        pytest.skip("everything is started as usual here")
    return command


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]], ids=["file", "module"])
def test_a_program_sees_what_it_would_see(start, tmp_path, how, method):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "COLOUR": "blue", "PYTHONPATH": str(tmp_path / "packages")}

    def run(command):
        return subprocess.run(
            [*command, *how, method, "--flag", "a b"],
            cwd=tmp_path,
            env=environment,
            input="typed",
            capture_output=True,
            text=True,
            timeout=300,
        )

    ours, wanted = run(start), run(COLD)
    assert json.loads(ours.stdout) == json.loads(wanted.stdout)
    assert (ours.returncode, ours.stderr) == (wanted.returncode, wanted.stderr)
    assert json.loads(ours.stdout)["spawned"][0] == 9


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(5)", 5),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_it_would_end(start, program, code):
    for command in (start, COLD):
        assert subprocess.run([*command, "-c", program], capture_output=True, timeout=300).returncode == code


def test_what_torchrun_sends_reaches_it_and_what_it_started(start):
    """SIGTERM is handled in the program; when the client is killed, program and children go with it."""
    program = (
        "import signal, time; signal.signal(15, lambda *_: exit(7)); print('up', flush=True); time.sleep(300)"
    )
    process = subprocess.Popen([*start, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.terminate()
    assert process.wait(60) == 7
    program = "import subprocess; print('up', flush=True); subprocess.run(['sleep', '300'])"
    process = subprocess.Popen([*start, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    process.kill()
    assert process.stdout.read() == b"", "nobody holds the pipe any more"


def test_ranks_have_hash_seeds_of_their_own(start):
    warm.python(2)
    seen = {
        subprocess.run(
            [*start, "-c", "print(hash('expert'))"],
            env={**os.environ, "LOCAL_RANK": rank},
            capture_output=True,
            timeout=300,
        ).stdout
        for rank in "01"
    }
    assert len(seen) == 2
