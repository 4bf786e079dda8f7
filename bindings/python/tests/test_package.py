"""Tests of the installed package in a Python without other packages."""

import ctypes
import errno
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import models
import unweight
from processes import forked


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)

    def bundle(self, **options):
        self.tensors = models.small(self.home / "model")
        unweight.compress(self.home / "model", self.home / "bundle", **options)
        return unweight.Bundle(self.home / "bundle")


class Package(unittest.TestCase):
    def test_no_other_packages_are_installed(self):
        for name in ("numpy", "torch", "transformers", "ml_dtypes"):
            self.assertIsNone(importlib.util.find_spec(name), f"{name} is installed; these tests run without it")
        self.assertFalse({"numpy", "torch"} & set(sys.modules))

    def test_the_package_has_metadata(self):
        self.assertEqual(importlib.metadata.version("unweight"), unweight.__version__)
        home = pathlib.Path(unweight.__file__).parent
        self.assertTrue((home / "py.typed").is_file() and (home / "_native.pyi").is_file())
        for name in unweight.__all__:
            self.assertTrue(hasattr(unweight, name), name)

    def test_the_package_has_its_licences(self):
        files = importlib.metadata.files("unweight")
        texts = {file.name: file.read_text() for file in files if "licenses" in file.parts}
        self.assertEqual(sorted(texts), ["LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY.txt"])
        self.assertIn("pyo3 ", texts["THIRD-PARTY.txt"])

    def test_the_stub_matches_the_module(self):
        import ast

        from unweight import _native

        stub = ast.parse((pathlib.Path(unweight.__file__).parent / "_native.pyi").read_text())
        there = {name for name in vars(_native) if not name.startswith("__") or name == "__version__"}
        stubbed = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        self.assertEqual(stubbed | {"__version__"}, there)
        for node in stub.body:
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)} - {"__init__"}
                own = {name for name in vars(getattr(_native, node.name)) if name not in ("__doc__", "__module__")}
                self.assertEqual(methods - {"__new__"}, own - {"__new__"}, node.name)

    def test_the_command_is_installed(self):
        script = pathlib.Path(sys.executable).parent / "unweight"
        for command in ([str(script)], [sys.executable, "-m", "unweight"]):
            done = subprocess.run([*command, "--version"], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (0, f"unweight {unweight.__version__}\n"), done.stderr)
        refused = subprocess.run([sys.executable, "-m", "unweight", "verify", "/nowhere"], capture_output=True)
        self.assertEqual(refused.returncode, 2)


class Work(Case):
    def test_compress_and_decompress_round_trip(self):
        self.bundle(profile="packed")
        model, bundle, restored = (self.home / name for name in ("model", "bundle", "restored"))
        unweight.decompress(bundle, restored)
        for file in model.iterdir():
            self.assertEqual((restored / file.name).read_bytes(), file.read_bytes(), file.name)
        self.assertEqual(sorted(os.listdir(restored)), sorted(os.listdir(model)))
        report = unweight.verify(bundle, against=model)
        self.assertEqual((report["problems"], report["against_source"]), ([], True))

    def test_reports_have_the_keys_of_the_command_line(self):
        import json

        self.bundle(profile="packed")
        model, bundle = self.home / "model", self.home / "bundle"
        calls = {
            "plan": (lambda: unweight.plan(model, profile="packed"), ["plan", model, "--profile", "packed"]),
            "verify": (lambda: unweight.verify(bundle), ["verify", bundle]),
            "inspect": (lambda: unweight.inspect(bundle), ["inspect", bundle]),
            "compress": (
                lambda: unweight.compress(model, self.home / "again", profile="packed"),
                ["compress", model, "-o", self.home / "third", "--profile", "packed"],
            ),
            "decompress": (
                lambda: unweight.decompress(bundle, self.home / "back"),
                ["decompress", bundle, "-o", self.home / "back2"],
            ),
        }
        for name, (call, arguments) in calls.items():
            with self.subTest(name):
                command = [sys.executable, "-m", "unweight", "--json", *map(str, arguments)]
                printed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
                report = call()
                self.assertEqual(set(printed) - {"command", "unweight_version"}, set(report))
                varying = {"command", "unweight_version", "seconds", "stages", "peak_rss_bytes", "creator"}
                for key in set(report) - varying:
                    self.assertEqual(report[key], printed[key], key)

    def test_options_are_applied(self):
        bundle = self.bundle(profile="palette", include=["*gate*", "*up*"], exclude=["*.1.*"])
        coded = {info.name for info in bundle.tensors() if info.encoding != "raw"}
        self.assertEqual(coded, {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")})
        with self.assertRaises(unweight.OutputExistsError):
            unweight.compress(self.home / "model", self.home / "bundle")
        unweight.compress(self.home / "model", self.home / "bundle", force=True, skip=["config.json"])
        self.assertFalse((self.home / "bundle" / "config.json").exists())

    def test_differences_from_a_base_are_restored_with_it(self):
        models.small(self.home / "base")
        shutil.copytree(self.home / "base", self.home / "tuned")
        weights = next((self.home / "tuned").glob("*.safetensors"))
        changed = bytearray(weights.read_bytes())
        changed[-2] ^= 1
        weights.write_bytes(changed)
        base, delta = self.home / "base", self.home / "elsewhere" / "delta"
        report = unweight.compress(self.home / "tuned", delta, base=base)
        self.assertGreater(report["base_tensors"], 0)
        whole = unweight.compress(self.home / "tuned", self.home / "whole")
        self.assertLess(report["stored_bytes"], whole["stored_bytes"])
        self.assertEqual(unweight.verify(delta, base=base)["problems"], [])
        unweight.decompress(delta, self.home / "back", base=base)
        self.assertEqual((self.home / "back" / weights.name).read_bytes(), changed)
        for without in (lambda: unweight.verify(delta), lambda: unweight.decompress(delta, self.home / "none")):
            with self.assertRaisesRegex(unweight.UnweightError, "without it; pass base=DIR$"):
                without()
        for opened in (unweight.Bundle, unweight.inspect):
            with self.assertRaisesRegex(unweight.UnweightError, r"without it; restore .* decompress\(.*base=DIR\)$"):
                opened(delta)

    def test_an_unmarkable_configuration_warns(self):
        models.small(self.home / "model")
        (self.home / "model" / "config.json").write_text('{"transformers_weights": "x.safetensors"}')
        with self.assertWarnsRegex(UserWarning, "copied unchanged .it already has the key transformers_weights"):
            report = unweight.compress(self.home / "model", self.home / "bundle")
        self.assertEqual([one["name"] for one in report["unmarked_configs"]], ["config.json"])

    def test_wrong_arguments_are_refused_before_anything_is_written(self):
        models.small(self.home / "model")
        for wrong, says in (
            ({"profile": "zip"}, "known: distribution"),
            ({"scope": "none"}, "known: mlp"),
            ({"verify": "twice"}, "known: none"),
            ({"code_limit": 99}, "from 6 to 15"),
            ({"threads": 0}, "give 1 or more"),
            ({"threads": 10**9}, "threads is 1000000000; give 1024 or fewer"),
            ({"threads": -1}, "threads=-1; give a number from 0"),
            ({"threads": 10**30}, "threads=1000000000000000000000000000000; give a number from 0"),
            ({"ram_bytes": -1}, "ram_bytes=-1; give a number from 0"),
            ({"ram_bytes": 0}, "ram_bytes=0; give 1 or more"),
        ):
            with self.subTest(wrong), self.assertRaisesRegex(ValueError, says):
                unweight.compress(self.home / "model", self.home / "bundle", **wrong)
        with self.assertRaisesRegex(TypeError, "give a list"):
            unweight.compress(self.home / "model", self.home / "bundle", include="*gate*")
        for wrong, says in (({"threads": 1.5}, "threads=1.5; give a whole number"), ({"plan_file": 3}, "os.PathLike")):
            with self.subTest(wrong), self.assertRaisesRegex(TypeError, says):
                unweight.compress(self.home / "model", self.home / "bundle", **wrong)
        self.assertEqual(os.listdir(self.home), ["model"])

    def test_a_callback_that_is_not_callable_is_refused_before_the_work(self):
        with self.assertRaisesRegex(TypeError, "progress=3; give a function"):
            unweight.compress(self.home / "model", self.home / "bundle", progress=3)
        self.assertFalse((self.home / "bundle").exists())
        with self.assertRaisesRegex(ValueError, "code_limit=-1; give a number from 0"):
            unweight.compress(self.home / "model", self.home / "bundle", code_limit=-1)

    def test_progress_is_reported_on_this_thread_and_ends_at_the_total(self):
        models.small(self.home / "model")
        calls = []
        unweight.compress(
            self.home / "model", self.home / "bundle", progress=lambda at: calls.append((at, threading.get_ident()))
        )
        last, _ = calls[-1]
        self.assertIsInstance(last, unweight.Progress)
        self.assertEqual(last.file, "model.safetensors")
        self.assertGreater(last.total_bytes, 0)
        self.assertGreaterEqual(last.done_bytes, last.total_bytes)
        self.assertEqual({thread for _, thread in calls}, {threading.get_ident()})


class Stopped(Case):
    """Cancellation of work on a model with many tensors, which takes long enough on one thread."""

    def model(self):
        (self.home / "model").mkdir()
        weights = models.bf16(1 << 16, 1) * 32
        tensors = {f"layers.{i}.weight": ("BF16", [2048, 1024], weights) for i in range(48)}
        models.safetensors(self.home / "model" / "model.safetensors", tensors)
        return self.home / "model"

    def test_an_exception_of_the_callback_stops_the_work_which_can_resume(self):
        class Enough(Exception):
            pass

        def progress(at):
            if at.done_bytes > at.total_bytes // 8:
                raise Enough

        model, bundle = self.model(), self.home / "bundle"
        with self.assertRaises(Enough) as caught:
            unweight.compress(model, bundle, threads=1, progress=progress)
        self.assertIsInstance(caught.exception.__cause__, unweight.CancelledError)
        self.assertIn("resume=True", str(caught.exception.__cause__))
        self.assertEqual(caught.exception.__cause__.file, f"{bundle}.partial")
        self.assertFalse(bundle.exists())
        report = unweight.compress(model, bundle, resume=True)
        self.assertGreater(report["resumed_tensors"] + len(report["resumed_files"]), 0)

    def test_ctrl_c_stops_the_work(self):
        program = (
            "import signal, sys, unweight\n"
            # A shell that starts this in the background sets SIGINT to be ignored.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "try:\n"
            "    unweight.compress(*sys.argv[1:], threads=1, progress=lambda at: print(at.done_bytes, flush=True))\n"
            "except KeyboardInterrupt as stop:\n"
            "    sys.exit(9 if isinstance(stop.__cause__, unweight.CancelledError) else 8)\n"
        )
        command = [sys.executable, "-c", program, str(self.model()), str(self.home / "bundle")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            child.send_signal(signal.SIGINT)
            child.stdout.read()
        self.assertEqual(child.returncode, 9)
        self.assertFalse((self.home / "bundle").exists())

    def test_other_threads_run_meanwhile(self):
        model, counted, done = self.model(), [0], threading.Event()

        def count():
            while not done.is_set():
                counted[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        started = time.monotonic()
        unweight.compress(model, self.home / "bundle", threads=1, verify="none")
        seconds = time.monotonic() - started
        done.set()
        thread.join()
        self.assertGreater(counted[0], seconds * 20)


class Read(Case):
    def test_tensors_and_their_bytes(self):
        bundle = self.bundle(profile="packed")
        self.assertEqual(sorted(bundle), sorted(self.tensors))
        self.assertEqual(len(bundle), len(self.tensors))
        self.assertIn("scale", bundle)
        self.assertNotIn("nothing", bundle)
        self.assertEqual((bundle.profile, bundle.path), ("packed", self.home / "bundle"))
        self.assertIn("packed", repr(bundle))
        for name, (dtype, shape, data) in self.tensors.items():
            info = bundle.info(name)
            self.assertEqual((info.dtype, info.shape, info.original_bytes), (dtype, tuple(shape), len(data)))
            self.assertEqual(bundle.read(name), data)
            buffer = ctypes.create_string_buffer(len(data))
            bundle.decode_into(name, ctypes.addressof(buffer), len(data), file="model.safetensors")
            self.assertEqual(buffer.raw, data)
        self.assertEqual(bundle.info("model.layers.1.mlp.gate_proj.weight").layer, 1)
        self.assertEqual(bundle.info("model.layers.1.mlp.gate_proj.weight").encoding, "packed")

    def test_a_buffer_of_another_size_is_refused(self):
        bundle = self.bundle()
        with self.assertRaisesRegex(ValueError, "has 24 bytes, but the buffer has 23"):
            bundle.decode_into("scale", 1, 23)
        with self.assertRaisesRegex(ValueError, "address is 0"):
            bundle.decode_into("scale", 0, 24)
        for address in (-1, 2**64):
            with self.subTest(address), self.assertRaisesRegex(ValueError, f"address={address}; give a number from 0"):
                bundle.decode_into("scale", address, 24)
        with self.assertRaisesRegex(TypeError, "give a whole number"):
            bundle.decode_into("scale", 1.5, 24)

    def test_paths_may_be_bytes(self):
        self.bundle()
        path = os.fsencode(self.home / "bundle")
        self.assertEqual(unweight.Bundle(path).path, self.home / "bundle")
        self.assertEqual(unweight.verify(path)["problems"], [])
        unweight.decompress(path, os.fsencode(self.home / "restored"))
        self.assertTrue((self.home / "restored" / "model.safetensors").is_file())
        self.assertEqual(unweight.inspect(path)["options"]["profile"], "distribution")

    def test_a_missing_package_names_its_versions(self):
        bundle = self.bundle()
        with self.assertRaisesRegex(ModuleNotFoundError, r"torch is not installed; pip install 'torch[<>=\d.,]+'$"):
            bundle.torch("scale")
        with self.assertRaisesRegex(ModuleNotFoundError, r"numpy is not installed; pip install 'numpy>=[\d.]+'$"):
            bundle.numpy("scale")
        for module, package in (("transformers", "transformers"), ("ops", "torch")):
            with self.assertRaisesRegex(ModuleNotFoundError, rf"pip install .*'{package}[<>=!*\d.,]+'"):
                importlib.import_module(f"unweight.{module}")

    def test_files_next_to_the_weights_may_be_missing_or_edited(self):
        self.bundle()
        with (self.home / "bundle" / "config.json").open("a") as config:
            config.write("\n")
        bundle = unweight.Bundle(self.home / "bundle")
        self.assertEqual(bundle.read("scale"), self.tensors["scale"][2])
        self.assertIsNone(bundle.copied("tokenizer.json"))

    def test_a_configuration_of_another_bundle_is_refused(self):
        bundle, other = self.bundle(), self.home / "other"
        unweight.compress(self.home / "model", other, profile="packed")
        named = unweight.Bundle(other).weights_digest
        config = self.home / "bundle" / "config.json"
        self.assertIn(f'"weights_digest": "{bundle.weights_digest}"', config.read_text())
        config.write_bytes((other / "config.json").read_bytes())
        with self.assertRaises(unweight.DamagedError) as refused:
            unweight.Bundle(self.home / "bundle")
        self.assertEqual(refused.exception.file, str(config))
        digests = f"the weights {named}, but those of unweight.json are {bundle.weights_digest}"
        self.assertIn(digests, str(refused.exception))
        # Configurations from elsewhere, as engines pass them.
        bundle.refuse_other(bundle.weights_digest)
        bundle.refuse_other(None)
        with self.assertRaisesRegex(unweight.DamagedError, named):
            bundle.refuse_other(named)

    def test_a_copy_opens_the_same_folder(self):
        import copy
        import pickle

        for name, layers in (("here", 3), ("there", 1)):
            models.small(self.home / name / "model", layers=layers)
            unweight.compress(self.home / name / "model", self.home / name / "bundle")
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.home / "here")
        bundle = unweight.Bundle("bundle")
        self.assertEqual(bundle.path, pathlib.Path("bundle"))
        os.chdir(self.home / "there")
        copies = [copy.copy(bundle), copy.deepcopy(bundle), pickle.loads(pickle.dumps(bundle))]
        for again in (*copies, copy.copy(copies[0])):
            self.assertEqual(again.manifest_digest, bundle.manifest_digest)
            self.assertEqual(again.names(), bundle.names())
        name = "model.layers.2.mlp.up_proj.weight"
        # The open bundle keeps working, too.
        self.assertEqual(bundle.read(name), copy.copy(bundle).read(name))
        os.chdir(self.home)
        self.assertEqual(bundle.copied("config.json"), (self.home / "here" / "model" / "config.json").read_bytes())

    def test_a_forked_process_reads_and_compresses(self):
        import pickle

        bundle = self.bundle()
        expected = {name: bundle.read(name) for name in bundle}
        again = pickle.loads(pickle.dumps(bundle))
        self.assertEqual((again.path.name, again.names()), (bundle.path.name, bundle.names()))

        def work():
            same = {name: bundle.read(name) for name in bundle} == expected
            unweight.compress(self.home / "model", self.home / "forked")
            return same and unweight.Bundle(self.home / "forked").names()

        self.assertEqual(forked(work, 60), 0)

    def test_a_forked_process_may_have_its_parent_s_pid(self):
        bundle = self.bundle()
        own = ["unshare", "--pid", "--fork", "--kill-child"]
        try:
            subprocess.run([*own, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as why:
            self.skipTest(f"namespaces cannot be made here: {why}")
        # Process 1 of a pid namespace reads, and its forked child is process 1 of another namespace.
        text = """
import ctypes, os, sys, unweight
bundle = unweight.Bundle(sys.argv[1])
name = bundle.names()[0]
expected = bundle.read(name)
assert ctypes.CDLL(None).unshare(0x20000000) == 0
child = os.fork()
if child == 0:
    os._exit(0 if os.getpid() == 1 and bundle.read(name) == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        run = [*own, sys.executable, "-W", "ignore", "-c", text, str(bundle.path)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_several_threads_read_one_bundle(self):
        bundle, wrong = self.bundle(), []

        def read(name, data):
            for _ in range(20):
                if bundle.read(name) != data:
                    wrong.append(name)

        threads = [threading.Thread(target=read, args=(name, data)) for name, (_, _, data) in self.tensors.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_running_out_of_memory_is_an_error(self):
        (self.home / "large").mkdir()
        models.safetensors(self.home / "large" / "model.safetensors", {"t": ("U8", [64 << 20], bytes(64 << 20))})
        unweight.compress(self.home / "large", self.home / "packed")
        script = """
import resource, sys, unweight
bundle = unweight.Bundle(sys.argv[1])
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for room in (32, 96):
    resource.setrlimit(resource.RLIMIT_AS, (now + (room << 20), resource.RLIM_INFINITY))
    try:
        print(len(bundle.read("t")) >> 20)
    except MemoryError:
        print("refused")
"""
        command = [sys.executable, "-c", script, str(self.home / "packed")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.stdout, "refused\n64\n", done.stderr[-2000:])


class Errors(Case):
    def test_errors_name_file_tensor_and_offset(self):
        with self.assertRaises(unweight.NotABundleError) as none:
            unweight.Bundle(self.home)
        self.assertEqual(none.exception.file, str(self.home))
        bundle = self.bundle(profile="packed")
        with self.assertRaises(KeyError) as unknown:
            bundle.read("nothing")
        self.assertIsInstance(unknown.exception, unweight.UnknownNameError)
        self.assertEqual(unknown.exception.tensor, "nothing")
        self.assertEqual(str(unknown.exception), "no tensor 'nothing' in the bundle")
        with self.assertRaises(unweight.ModelError) as empty:
            (self.home / "empty").mkdir()
            unweight.compress(self.home / "empty", self.home / "out")
        self.assertEqual((empty.exception.file, empty.exception.tensor), (str(self.home / "empty"), None))
        with self.assertRaises(FileExistsError) as exists:
            unweight.compress(self.home / "model", self.home / "bundle")
        self.assertIn("force=True", str(exists.exception))
        with self.assertRaises(OSError) as missing:
            unweight.compress(self.home / "not there", self.home / "out")
        self.assertEqual((type(missing.exception), missing.exception.errno), (unweight.StorageError, errno.ENOENT))

    def test_failing_to_start_threads_is_an_error(self):
        self.bundle()
        program = (
            "import sys, unweight\n"
            "model, bundle, out = sys.argv[1:]\n"
            "for work in (lambda: unweight.Bundle(bundle), lambda: unweight.compress(model, out, threads=1)):\n"
            "    try:\n"
            "        work()\n"
            "    except unweight.UnweightError as error:\n"
            "        assert 'cannot start threads' in str(error) and 'ulimit -u' in str(error), error\n"
            "    else:\n"
            "        sys.exit('it made threads')\n"
        )
        folders = [str(self.home / name) for name in ("model", "bundle", "out")]
        # Stacks larger than the address space, so that no thread can start.
        environment = {**os.environ, "RUST_MIN_STACK": str(1 << 46)}
        command = [sys.executable, "-c", program, *folders]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertFalse((self.home / "out").exists())

    def test_extras_install_the_versions_that_are_not_refused(self):
        from importlib import metadata

        from unweight._extras import _TESTED, refuse_untested, requirement

        def bounds(requirement, package):
            """Returns a set, because the order varies with the tool that builds the wheel."""
            return frozenset(requirement.partition(";")[0].strip().removeprefix(package).split(","))

        for package, ranges in _TESTED.items():
            declared = {bounds(one, package) for one in metadata.requires("unweight") if one.startswith(package)}
            self.assertEqual(declared, {bounds(requirement(package), package)})
            for first, last in ranges:
                refuse_untested(package, f"{first[0]}.{first[1]}.0")
                refuse_untested(package, f"{last[0]}.{last[1]}.99+cpu")
                for version in (
                    f"{last[0]}.{last[1] + 1}.0",
                    f"{first[0]}.{first[1] - 1}.1",
                    f"{last[0] + 2}.0",
                    "main",
                ):
                    with self.assertRaisesRegex(ImportError, f"unweight supports {package} .* but {version}"):
                        refuse_untested(package, version)
        self.assertEqual(requirement("transformers"), "transformers>=4.57,!=5.0.*,!=5.1.*,!=5.2.*,<5.18")

    def test_dfloat11_is_decoded_and_never_stored_as_bytes(self):
        model, dfloat11 = self.home / "model", self.home / "dfloat11"
        self.tensors = models.small(model)
        (model / "config.json").write_text(json.dumps({"hidden_size": 64, "intermediate_size": 128}))
        command = [sys.executable, "-m", "unweight", "convert", str(model), "-o", str(dfloat11), "--to", "dfloat11"]
        subprocess.run(command, check=True, capture_output=True)
        done = []
        unweight.compress(dfloat11, self.home / "bundle", profile="packed", progress=done.append)
        self.assertGreater(len(done), 1)
        bundle = unweight.Bundle(self.home / "bundle")
        self.assertEqual(set(bundle), set(self.tensors))
        for name, (dtype, shape, data) in self.tensors.items():
            info = bundle.info(name)
            self.assertEqual((info.dtype, list(info.shape), bundle.read(name)), (dtype, shape, data), name)
        with self.assertRaisesRegex(unweight.ModelError, "a DFloat11 model; compare with the BF16 model"):
            unweight.verify(self.home / "bundle", against=dfloat11)
        planned = unweight.plan(dfloat11)["tensors"]
        self.assertEqual({row["name"] for row in planned}, set(self.tensors))
        # Nothing is left next to the output.
        self.assertEqual({path.name for path in self.home.iterdir()}, {"model", "dfloat11", "bundle"})
        with self.assertRaisesRegex(unweight.NotABundleError, "a DFloat11 model, not a bundle; .* unweight.compress"):
            unweight.Bundle(dfloat11)

        def cancel(_: unweight.Progress) -> None:
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            unweight.compress(dfloat11, self.home / "other", progress=cancel)
        # Without its configuration, it is refused by the name of a unit.
        (dfloat11 / "config.json").write_text("{}")
        for attempt in (lambda: unweight.compress(dfloat11, self.home / "other"), lambda: unweight.plan(dfloat11)):
            with self.assertRaisesRegex(unweight.ModelError, "has no dfloat11_config, but .* has the DFloat11 unit"):
                attempt()
        self.assertEqual({path.name for path in self.home.iterdir()}, {"model", "dfloat11", "bundle"})

    def test_a_flipped_bit_is_found_and_located(self):
        bundle = self.bundle(profile="packed")
        shard = self.home / "bundle" / "model.safetensors"
        data = bytearray(shard.read_bytes())
        at = data.find(self.tensors["scale"][2])
        data[at] ^= 1
        shard.write_bytes(data)
        with self.assertRaises(unweight.DamagedError) as damaged:
            bundle.read("scale")
        place = (damaged.exception.file, damaged.exception.tensor, damaged.exception.offset)
        self.assertEqual(place, ("model.safetensors", "scale", at))
        self.assertIn("scale", str(damaged.exception))
        problems = unweight.verify(self.home / "bundle")["problems"]
        found = [(problem["file"], problem["tensor"]) for problem in problems]
        self.assertEqual(found, [("model.safetensors", "scale")])

    def test_one_base_class_catches_all(self):
        for name in unweight.__all__:
            thing = getattr(unweight, name)
            if isinstance(thing, type) and issubclass(thing, Exception):
                self.assertTrue(issubclass(thing, unweight.UnweightError), name)
                error = thing("what", file="a", tensor="b", offset=3)
                self.assertEqual((str(error), error.file, error.tensor, error.offset), ("what", "a", "b", 3))


if __name__ == "__main__":
    unittest.main()
