import asyncio
import contextlib
import dataclasses
import math
import socket
import threading

import pytest
import tornado.httpclient
import tornado.netutil
from prometheus_client import parser

from tests.runtime.status import watched
from tff_dpftrl.runtime.status import access, page

HISTORY = [{"round": 0, "committed_at": watched.START, "epoch": 1, "loss": 2.5}]


@contextlib.asynccontextmanager
async def served(
    *told, privacy=lambda task: None, history=lambda task: [], reports=None, **changes
):
    shown = [page.Shown(one.seen, privacy, history, reports) for one in told]
    status = page.StatusServer(shown, **changes)
    await status.start()
    try:
        yield status
    finally:
        await status.stop()


async def fetch(url, **changes):
    client = tornado.httpclient.AsyncHTTPClient(force_instance=True)
    try:
        return await client.fetch(url, raise_error=False, **changes)
    finally:
        client.close()


async def page_text(url, *words):
    """The page, when it has all words: what is read on a thread comes with a later request."""
    for _ in range(200):
        answer = await fetch(url)
        assert answer.code == 200
        text = answer.body.decode()
        if all(word in text for word in words):
            return text
        await asyncio.sleep(0.05)
    raise AssertionError(f"they never came: {words}")


def test_the_page_and_its_metrics_are_served():
    told = watched.Watched("evaluate", "train")
    told.seen.tasks["evaluate"].settings = dataclasses.replace(
        told.seen.tasks["evaluate"].settings, model_of="train"
    )
    told.lead()
    told.round()
    threads = set()

    def history(task):
        threads.add(threading.current_thread())
        return [HISTORY[0] | {"round": i} for i in range(3)]

    async def scenario():
        async with served(
            told,
            privacy=lambda task: (
                {"epsilon": 1.5, "delta": 1e-6, "rho_zcdp": math.nan} if task == "train" else None
            ),
            history=history,
        ) as status:
            assert status.address.startswith("http://127.0.0.1:")
            for path in ("/page.js", "/page.css", "/icon.svg"):
                answer = await fetch(status.address + path)
                assert (answer.code, len(answer.body) > 100) == (200, True), path
            text = await page_text(status.address, "δ = 1e-06", "data:image/png;base64,")
            assert "<h2>Task train</h2>" in text  # Not the evaluation, without a choice.
            assert "<td>1.5</td>" in text and "ρ" not in text
            text = await page_text(status.address + "/?task=0")
            assert "Evaluates the model of train." in text
            answer = await fetch(status.address + "/metrics")
            families = {
                family.name: family
                for family in parser.text_string_to_metric_families(answer.body.decode())
            }
            assert families["tff_dpftrl_privacy_epsilon"].samples[0].value == 1.5

    asyncio.run(scenario())
    assert threading.main_thread() not in threads  # Where pictures are drawn, too.


def test_each_population_has_its_page():
    one, other = watched.Watched(), watched.Watched("<b>")

    async def scenario():
        async with served(one, other) as status:
            front = await page_text(status.address)
            assert '<a href="0/">keyboard</a>' in front and '<a href="1/">keyboard</a>' in front
            assert "&lt;b&gt;" in await page_text(status.address + "/1/")
            for path in ("/1/page.css", "/1/metrics", "/0/page.js"):
                assert (await fetch(status.address + path)).code == 200, path
            assert (await fetch(status.address + "/2/")).code == 404

    asyncio.run(scenario())


def test_files_of_the_report_are_served_and_nothing_else_of_the_folder(tmp_path):
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.html").write_bytes(b"<b>fine</b>")
    (report / "metrics.csv").write_bytes(b"secret")
    (tmp_path / "privacy_statement.md").write_bytes(b"outside")

    async def scenario():
        folders = {"train": report, "evaluate": tmp_path / "missing"}
        told = watched.Watched(*folders)
        async with served(told, reports=folders.get) as status:
            answer = await fetch(status.address + "/report/0/report.html")
            assert (answer.code, answer.body) == (200, b"<b>fine</b>")
            assert answer.headers["Content-Type"].startswith("text/html")
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "sandbox" in policy
            assert "script-src" not in policy
            for path in (
                "/report/0/metrics.csv",
                "/report/0/privacy_statement.md",
                "/report/0/../privacy_statement.md",
                "/report/0/..%2Fprivacy_statement.md",
                "/report/1/report.html",
                "/report/2/report.html",
                "/report/-1/report.html",
                "/report/0/",
            ):
                assert (await fetch(status.address + path)).code == 404, path
            assert "report/0/report.html" in await page_text(status.address)
            assert "No report is written yet" in await page_text(status.address + "/?task=1")
        async with served(told) as status:
            assert (await fetch(status.address + "/report/0/report.html")).code == 404
        async with served(told, reports=folders.get, allowed=access.Access(token=TOKEN)) as status:
            assert (await fetch(status.address + "/report/0/report.html")).code == 401

    asyncio.run(scenario())


def test_it_is_for_reading_and_answers_to_names_of_this_machine_only():
    async def scenario():
        async with served(watched.Watched()) as status:
            for method, body in (("POST", b""), ("PUT", b""), ("DELETE", None), ("PATCH", b"")):
                answer = await fetch(status.address + "/", method=method, body=body)
                assert answer.code == 405
            assert (await fetch(status.address + "/", method="HEAD")).code == 200
            answer = await fetch(status.address + "/metrics", headers={"Host": "evil.example"})
            assert answer.code == 403
            port = status.address.rpartition(":")[2]
            answer = await fetch(status.address + "/", headers={"Host": f"localhost:{port}"})
            assert answer.code == 200
            for path in (
                "/nothing",
                "/../page.py",
                "/assets/page.html",
                "/data.json",
                "/?task=1",
                "/?task=-1",
                "/?task=x",
                "/?task=99999999999999999999",
                "/?task=%C2%B2",
            ):
                answer = await fetch(status.address + path)
                assert answer.code == 404, path
                assert "Content-Security-Policy" in answer.headers

    asyncio.run(scenario())


OTHERS = "10.0.0.1"  # For other machines; the tests listen on loopback all the same.
TOKEN = "correct-horse-battery"


@pytest.fixture(name="listens_on_loopback")
def _listens_on_loopback(monkeypatch):
    bind = tornado.netutil.bind_sockets

    def bind_loopback(port, address, family):
        return bind(port, "127.0.0.1" if address == OTHERS else address, family)

    monkeypatch.setattr(tornado.netutil, "bind_sockets", bind_loopback)


def test_the_page_is_shown_to_other_machines_by_a_decision_only():
    async def scenario():
        async with served(watched.Watched(), host=OTHERS):
            pass

    with pytest.raises(ValueError, match="host='10.0.0.1' is for other machines"):
        asyncio.run(scenario())


@pytest.mark.usefixtures("listens_on_loopback")
def test_an_open_page_answers_to_no_foreign_name_either():
    allowed = access.Access(names=["status.example.org"], is_open=True)

    async def scenario():
        async with served(watched.Watched(), host=OTHERS, allowed=allowed) as status:
            port = status.address.rpartition(":")[2]
            for path in ("/", "/metrics", "/nothing"):
                url = f"http://127.0.0.1:{port}{path}"
                for name in (OTHERS, "status.example.org", "Status.Example.org:80"):
                    answer = await fetch(url, headers={"Host": name})
                    assert answer.code == (404 if path == "/nothing" else 200)
                for name in ("evil.example", "evil.example:80", "status.example.org.evil.example"):
                    answer = await fetch(url, headers={"Host": name})
                    assert (answer.code, answer.body) == (403, b"403 Not a name of this server\n")

    asyncio.run(scenario())


@pytest.mark.usefixtures("listens_on_loopback")
@pytest.mark.parametrize("host", ["127.0.0.1", OTHERS])
def test_a_page_with_a_token_is_for_those_who_have_it(host):
    async def scenario():
        allowed = access.Access(token=TOKEN)
        async with served(watched.Watched(), host=host, allowed=allowed) as status:
            url = f"http://127.0.0.1:{status.address.rpartition(':')[2]}"
            for path in ("/", "/page.js", "/?task=0", "/metrics", "/nothing"):
                for method in ("GET", "HEAD"):
                    answer = await fetch(url + path, method=method)
                    assert answer.code == 401, path
                    assert answer.headers["WWW-Authenticate"].startswith("Basic realm=")
                    assert "Content-Security-Policy" in answer.headers
                answer = await fetch(f"{url}{path}?token={TOKEN}")
                assert answer.code == 401
            wrong = {"Authorization": f"Bearer {TOKEN[:-1]}"}
            assert (await fetch(url, headers=wrong)).code == 401
            scraper = {"Authorization": f"Bearer {TOKEN}"}
            answer = await fetch(f"{url}/metrics", headers=scraper)
            assert answer.code == 200 and b"tff_dpftrl_devices" in answer.body
            foreign = {**scraper, "Host": "evil.example"}
            assert (await fetch(f"{url}/metrics", headers=foreign)).code == 403
            browser = {"auth_username": "me", "auth_password": TOKEN}
            assert (await fetch(f"{url}/", **browser)).code == 200

    asyncio.run(scenario())


def test_nothing_may_come_from_elsewhere_and_no_script_stand_in_the_page():
    async def scenario():
        async with served(watched.Watched()) as status:
            for path in ("/", "/page.js", "/page.css", "/icon.svg", "/metrics"):
                answer = await fetch(status.address + path)
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "script-src 'self'" in policy
                assert "img-src 'self' data:;" in policy and "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in answer.headers
                assert "Server" not in answer.headers
                text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
                for word in ("http:", "https:", "innerHTML", "outerHTML", "insertAdjacent", "eval"):
                    assert word not in text, (path, word)

    asyncio.run(scenario())


def test_a_port_in_use_is_told_by_name():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1 port {port}"):
                async with served(watched.Watched(), port=port):
                    pass

    asyncio.run(scenario())


def test_what_cannot_be_read_is_told_and_the_rest_is_shown(caplog):
    def broken(task):
        raise OSError("/secret/path is gone")

    async def scenario():
        told = watched.Watched()
        told.round()
        async with served(told, privacy=broken, history=broken) as status:
            told_of = "cannot be read (OSError): see the server&#x27;s log"
            text = await page_text(status.address, told_of, f"The committed rounds {told_of}")
            assert "accepted" in text and "secret" not in text
            assert (await fetch(status.address + "/metrics")).code == 200

    asyncio.run(scenario())


def test_after_the_stop_the_port_is_free_again():
    async def scenario():
        async with served(watched.Watched()) as status:
            address = status.address
            assert (await fetch(address)).code == 200
        port = int(address.rpartition(":")[2])
        async with served(watched.Watched(), port=port) as status:
            assert status.address == address
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1)

    asyncio.run(scenario())
