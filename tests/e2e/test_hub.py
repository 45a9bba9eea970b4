"""`phsa models fetch owner/name` against a local server that speaks the hub's API."""

import hashlib
import http.server
import json
import pathlib
import threading

import numpy as np
import pytest
from conftest import run_phsa
from gguf_files import write_out
from test_cli import write_gguf

gguf = pytest.importorskip("gguf")
REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A hub whose large files come from another host, as the real one's do."""

    def __init__(self, files, token=None):
        self.files, self.token = files, token
        self.asked = []  # (host, path, Range, Authorization)
        self.cut_after = None  # bytes of a large file after which the connection ends, once
        self.damage = False
        self.hub, self.store = (self.serve(name) for name in ("hub", "store"))

    def serve(self, host):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                given, wanted = self.headers.get("Authorization"), self.headers.get("Range")
                outer.asked.append((host, self.path, wanted, given))
                if host == "hub" and outer.token and given != f"Bearer {outer.token}":
                    return self.send_error(401)
                if self.path == "/api/models/org/name/revision/main?blobs=true":
                    return self.give(json.dumps({"sha": REVISION, "siblings": outer.siblings()}).encode())
                start = f"/org/name/resolve/{REVISION}/"
                name = self.path.removeprefix(start) if host == "hub" else self.path[1:]
                if name not in outer.files or (host == "hub" and not self.path.startswith(start)):
                    return self.send_error(404)
                content = outer.files[name]
                if host == "hub" and outer.is_large(name):
                    self.send_response(302)
                    self.send_header("Location", f"{outer.url(outer.store)}/{name}")
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                if outer.damage:
                    content = content[:-1] + b"?"
                first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
                self.give(content[first:], 206 if wanted else 200, outer.is_large(name))

            def give(self, content, status=200, large=False):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                cut = outer.cut_after if large else None
                if cut is not None:
                    outer.cut_after = None
                    content = content[:cut]
                self.wfile.write(content)

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    @staticmethod
    def url(server):
        return f"http://127.0.0.1:{server.server_port}"

    @staticmethod
    def is_large(name):
        return name.endswith((".gguf", ".safetensors"))

    def siblings(self):
        out = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            item = {"rfilename": name, "size": len(content), "blobId": blob}
            if self.is_large(name):
                item["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            out.append(item)
        return out

    def close(self):
        for server in (self.hub, self.store):
            server.shutdown()
            server.server_close()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = []

    def make(files, token=None):
        made.append(Hub(files, token))
        monkeypatch.setenv("HF_ENDPOINT", made[-1].url(made[-1].hub))
        return made[-1]

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield make
    for one in made:
        one.close()


def fetch(name="org/name"):
    return run_phsa("models", "fetch", name, "--json")


def test_a_fetched_model_has_its_name_and_is_fetched_once(hub, tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    server = hub({"README.md": b"# A model", "tiny-q8_0.gguf": model}, token="secret")
    refused = fetch()
    assert refused.returncode == 1 and "HF_TOKEN" in refused.stderr
    done = run_phsa("models", "fetch", "org/name", "--json", env={"HF_TOKEN": "secret"})
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["path"]
    assert pathlib.Path(path).read_bytes() == model
    assert not any("README" in path for _, path, _, _ in server.asked), "only what the model needs"
    of_store = [given for host, _, _, given in server.asked if host == "store"]
    assert of_store == [None], "the token goes to the hub alone"
    assert run_phsa("models", "path", "org/name").stdout.strip() == path
    assert run_phsa("run", "-m", "org/name", "-p", "x", "-n", 1, "--raw").returncode == 0

    server.asked.clear()
    again = run_phsa("models", "fetch", "org/name", env={"HF_TOKEN": "secret"})
    assert again.returncode == 0, again.stderr
    assert [path for _, path, _, _ in server.asked] == ["/api/models/org/name/revision/main?blobs=true"]


def test_the_cache_is_the_hubs_own(hub, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    hub({"tiny.gguf": write_gguf(tmp_path / "tiny.gguf").read_bytes()})
    path = json.loads(fetch().stdout)["path"]
    theirs = huggingface_hub.hf_hub_download("org/name", "tiny.gguf", cache_dir=tmp_path / "hub", local_files_only=True)
    assert theirs == path


def test_what_was_interrupted_goes_on_from_there(hub, tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    server = hub({"tiny.gguf": model})
    server.cut_after = len(model) // 2
    cut = fetch()
    assert cut.returncode == 1 and cut.stdout == "", cut.stdout
    server.asked.clear()
    done = fetch()
    assert done.returncode == 0, done.stderr
    ranges = [wanted for host, _, wanted, _ in server.asked if host == "store"]
    assert ranges == [f"bytes={len(model) // 2}-"]
    assert pathlib.Path(json.loads(done.stdout)["path"]).read_bytes() == model


def test_damaged_content_never_gets_the_models_name(hub, tmp_path):
    server = hub({"tiny.gguf": write_gguf(tmp_path / "tiny.gguf").read_bytes()})
    server.damage = True
    done = fetch()
    assert done.returncode == 1 and "damaged" in done.stderr
    assert run_phsa("models", "path", "org/name").returncode == 2
    server.damage = False
    assert fetch().returncode == 0


def test_one_of_several_files_is_named(hub, tmp_path):
    model = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    hub({"m-Q4_K_M.gguf": model, "m-Q8_0.gguf": model})
    several = fetch()
    assert several.returncode == 2
    assert "m-Q4_K_M.gguf, m-Q8_0.gguf" in several.stderr
    done = fetch("org/name:Q8_0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"].endswith("m-Q8_0.gguf")
    missing = fetch("org/name:Q2_K")
    assert missing.returncode == 2 and "Q2_K" in missing.stderr


def test_names_that_are_nowhere_are_told(hub):
    hub({"README.md": b"nothing else"})
    assert "neither model.safetensors nor a .gguf file" in fetch().stderr
    unknown = fetch("org/other")
    assert unknown.returncode == 1 and "404" in unknown.stderr and "check the name" in unknown.stderr
    assert run_phsa("models", "fetch", "org/../name").returncode == 2


def test_a_folder_of_safetensors_is_fetched_whole(hub, tmp_path):
    test_models = pytest.importorskip("test_models")
    test_models.make_model("llama-sharded", tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub({**files, "pytorch_model.bin": b"not needed", "original/consolidated.00.pth": b"nor this"})
    done = fetch()
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["path"]
    info = json.loads(run_phsa("info", path, "--json").stdout)
    assert info["name"] == "org/name" and info["layers"] == 3


def split_gguf(folder, parts):
    """A small model cut by the package gguf, one tensor a file at least."""
    whole = gguf.GGUFReader(write_gguf(folder / "whole.gguf"))
    writer = gguf.GGUFWriter(folder / "split.gguf", "llama", split_max_tensors=-(-len(whole.tensors) // parts))
    add = {
        gguf.GGUFValueType.STRING: writer.add_string,
        gguf.GGUFValueType.UINT32: writer.add_uint32,
        gguf.GGUFValueType.FLOAT32: writer.add_float32,
        gguf.GGUFValueType.BOOL: writer.add_bool,
        gguf.GGUFValueType.ARRAY: writer.add_array,
    }
    for field in whole.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            add[field.types[0]](field.name, field.contents())
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    write_out(writer)
    return sorted(folder.glob("split-*.gguf"))


def test_a_split_model_is_fetched_with_all_its_parts_and_is_the_whole_one(hub, tmp_path):
    parts = split_gguf(tmp_path, 3)
    assert len(parts) == 3
    hub({path.name: path.read_bytes() for path in parts})
    done = fetch()
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["path"]
    ask = ("-p", "abc", "-n", 8, "--raw", "--temp", 0, "--ignore-eos")
    whole = run_phsa("run", "-m", tmp_path / "whole.gguf", *ask)
    split = run_phsa("run", "-m", "org/name", *ask)
    assert whole.returncode == 0 and split.stdout == whole.stdout
    assert "3 files" in run_phsa("info", path).stdout
    second = run_phsa("info", parts[1])
    assert second.returncode == 2 and "give the first" in second.stderr
    parts[2].unlink()
    missing = run_phsa("info", parts[0])
    assert missing.returncode == 2 and "part 3 of 3" in missing.stderr
