//! Tests `install.sh` against a file server on loopback. `cargo xtask test-release` tests the files of a release in
//! clean systems.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

mod workspace;

use workspace::root;

const VERSION: &str = "0.1.0";
/// A minisign public key.
const KEY: &str = "RWTPRtnWvsu6WK1GseuBquU2ng0dHtMDpqDXUam/NjTlvUO8KBlgB72L";
/// Programs that the script needs in every case. A case may add others.
const TOOLS: [&str; 13] =
    ["sh", "cat", "getconf", "gzip", "ldd", "mkdir", "mktemp", "mv", "rm", "sed", "sha256sum", "tar", "uname"];

/// The server's answer for a path.
#[derive(Clone)]
enum Answer {
    Whole(Vec<u8>),
    /// Sends the full length, then closes the connection after half of the body.
    Truncated(Vec<u8>),
    /// Sends a length but no body.
    Stalls,
}

/// A server with the files of a release.
struct Site {
    address: String,
    answers: Arc<Mutex<BTreeMap<String, Answer>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Site {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let site = Self { address, answers: Arc::default(), requests: Arc::default() };
        let (answers, requests) = (site.answers.clone(), site.requests.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answers, requests) = (answers.clone(), requests.clone());
                thread::spawn(move || answer(stream, &answers, &requests));
            }
        });
        site
    }

    /// Makes a site with a release whose command is this script.
    fn with_release(command: &str) -> Self {
        let site = Self::new();
        site.publish(VERSION, command);
        site
    }

    fn publish(&self, version: &str, command: &str) {
        self.publish_for("gnu", version, command);
    }

    /// Replaces the release by one for a C library alone.
    fn publish_for(&self, libc: &str, version: &str, command: &str) {
        let name = format!("unweight-{version}-{}-unknown-linux-{libc}", env::consts::ARCH);
        let folder = Folder::new();
        fs::create_dir(folder.path(&name)).unwrap();
        write_program(&folder.path(&name).join("unweight"), command);
        succeeds(Command::new("tar").arg("-C").arg(&folder.0).args(["-cf"]).arg(folder.path("tar")).arg(&name));
        let mut sums = String::new();
        for (extension, arguments) in [("gz", &["gzip", "-n"][..]), ("zst", &["zstd", "-q"])] {
            let tar = fs::File::open(folder.path("tar")).unwrap();
            let output = Command::new(arguments[0]).args(&arguments[1..]).arg("-c").stdin(tar).output();
            // Without zstd, the release has only one archive.
            let Ok(output) = output else { continue };
            let file = format!("{name}.tar.{extension}");
            sums += &format!("{}  {file}\n", sha256(&output.stdout));
            self.put(&format!("/download/v{version}/{file}"), Answer::Whole(output.stdout));
        }
        for folder in [format!("/download/v{version}"), "/latest/download".into()] {
            self.put(&format!("{folder}/SHA256SUMS"), Answer::Whole(sums.clone().into()));
        }
    }

    fn put(&self, path: &str, answer: Answer) {
        self.answers.lock().unwrap().insert(path.into(), answer);
    }

    /// Changes the answer for the archive only.
    fn change_archive(&self, change: impl Fn(Vec<u8>) -> Answer) {
        let mut answers = self.answers.lock().unwrap();
        for (path, answer) in answers.iter_mut().filter(|(path, _)| path.contains(".tar.")) {
            let Answer::Whole(bytes) = answer.clone() else { panic!("the answer for {path} was changed before") };
            *answer = change(bytes);
        }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn answer(stream: TcpStream, answers: &Mutex<BTreeMap<String, Answer>>, requests: &Mutex<Vec<String>>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    while reader.read_line(&mut line).ok()? > 2 {}
    requests.lock().unwrap().push(path.clone());
    let found = answers.lock().unwrap().get(&path).cloned();
    let mut stream = stream;
    let head = |bytes: usize| format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n");
    match found {
        None => stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok(),
        Some(Answer::Whole(bytes)) => stream.write_all(&[head(bytes.len()).as_bytes(), &bytes].concat()).ok(),
        Some(Answer::Truncated(bytes)) => {
            stream.write_all(&[head(bytes.len()).as_bytes(), &bytes[..bytes.len() / 2]].concat()).ok()
        }
        Some(Answer::Stalls) => {
            stream.write_all(head(1 << 20).as_bytes()).ok()?;
            // Wait until the client ends.
            stream.read(&mut [0]).map(|_| ()).ok()
        }
    }
}

/// A directory that is removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static CREATED: Mutex<u32> = Mutex::new(0);
        let mut created = CREATED.lock().unwrap();
        *created += 1;
        let path = env::temp_dir().join(format!("unweight-install-{}-{created}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self, name: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(name)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn succeeds(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

fn sha256(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

fn write_program(path: &Path, text: &str) {
    let _ = fs::remove_file(path);
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Returns a command that prints this version.
fn command(version: &str) -> String {
    format!("#!/bin/sh\necho unweight {version}\n")
}

/// Finds a program on PATH.
fn tool(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Returns the script with this public key in the place of the publisher's.
fn script_with_key(key: &str) -> String {
    let text = fs::read_to_string(root().join("install.sh")).unwrap();
    let line = text.lines().find(|line| line.starts_with("public_key=")).expect("a line with the key");
    // The release workflow reads the key from this line.
    let known = line.strip_prefix("public_key=${UNWEIGHT_PUBLIC_KEY:-").and_then(|rest| rest.strip_suffix('}'));
    let known = known.expect("a default for UNWEIGHT_PUBLIC_KEY");
    assert!(known.is_empty() || known.starts_with("RW") && known.len() == KEY.len(), "'{known}' is not a public key");
    if let Ok(file) = fs::read_to_string(root().join("minisign.pub")) {
        assert_eq!(file.lines().nth(1), Some(known), "minisign.pub has another key");
    }
    text.replacen(line, &format!("public_key=${{UNWEIGHT_PUBLIC_KEY:-{key}}}"), 1)
}

/// A machine with its own `home`, and only `tools` on PATH.
struct System(Folder);

impl System {
    /// Makes a system with an HTTP client.
    fn new() -> Self {
        let machine = Self::without_client();
        let client = ["curl", "wget"].into_iter().find(|client| machine.add(client));
        assert!(client.is_some(), "install curl or wget for this test");
        machine
    }

    fn without_client() -> Self {
        let machine = Self(Folder::new());
        fs::create_dir(machine.0.path("home")).unwrap();
        fs::create_dir(machine.0.path("tools")).unwrap();
        for name in TOOLS {
            assert!(machine.add(name), "this test needs {name}");
        }
        machine
    }

    /// Adds a program of this machine. Returns false if the machine has no such program.
    fn add(&self, name: &str) -> bool {
        tool(name).is_some_and(|path| symlink(path, self.0.path("tools").join(name)).is_ok())
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.0.path("tools").join(name)).unwrap();
    }

    /// Replaces a program by a script.
    fn fake(&self, name: &str, text: &str) {
        write_program(&self.0.path("tools").join(name), text);
    }

    fn script(&self, site: &str, arguments: &[&str]) -> Command {
        self.script_in(Command::new(tool("sh").unwrap()), site, arguments)
    }

    /// Runs with the default action of every signal: a shell cannot trap signals that it ignored at its start, as under
    /// `nohup`.
    fn script_with_signals(&self, site: &str) -> Command {
        let mut command = Command::new(tool("env").unwrap());
        command.arg("--default-signal").arg(tool("sh").unwrap());
        self.script_in(command, site, &[])
    }

    fn script_in(&self, mut command: Command, site: &str, arguments: &[&str]) -> Command {
        command.args(["-s", "--"]).args(arguments).env_clear().env("HOME", self.0.path("home"));
        command.env("PATH", self.0.path("tools")).env("UNWEIGHT_RELEASES", site).current_dir(&self.0.0);
        let script = self.0.path("install.sh");
        fs::write(&script, script_with_key("")).unwrap();
        command.stdin(fs::File::open(script).unwrap());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, site: &Site, arguments: &[&str]) -> Output {
        self.script(&site.address, arguments).output().unwrap()
    }

    /// Runs the script, which must succeed. Returns its output.
    fn installs(&self, site: &Site, arguments: &[&str]) -> String {
        let output = self.run(site, arguments);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs the script, which must fail with this message and change nothing.
    fn refuses(&self, site: &Site, arguments: &[&str], message: &str) {
        let before = self.installed();
        let output = self.run(site, arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(message), "{message:?}: {text}");
        assert!(text.contains("error: ") && text.contains("help: "), "{text}");
        assert_eq!(self.installed(), before, "{message}");
    }

    /// Returns all files in `~/.local/bin`.
    fn installed(&self) -> BTreeMap<String, Vec<u8>> {
        let bin = self.0.path("home/.local/bin");
        if !bin.exists() {
            return BTreeMap::new();
        }
        let read = |name: &String| fs::read(bin.join(name)).unwrap_or_else(|_| b"a directory".into());
        self.0.names("home/.local/bin").into_iter().map(|name| (name.clone(), read(&name))).collect()
    }
}

fn only_command(text: &str) -> BTreeMap<String, Vec<u8>> {
    BTreeMap::from([("unweight".to_owned(), text.as_bytes().to_vec())])
}

#[test]
fn every_client_installs_the_latest_release() {
    for client in ["curl", "wget"] {
        let site = Site::with_release(&command(VERSION));
        let machine = System::without_client();
        machine.refuses(&site, &[], "neither curl nor wget is installed");
        if !machine.add(client) {
            continue;
        }
        let text = machine.installs(&site, &[]);
        assert!(text.contains("installed unweight 0.1.0 to ") && text.contains("is not on PATH"), "{text}");
        assert!(text.contains("signature: not checked, no public key"), "{text}");
        assert_eq!(machine.installed(), only_command(&command(VERSION)));
        let requests = site.requests();
        assert!(requests[0] == "/latest/download/SHA256SUMS" && requests[1].ends_with(".tar.gz"), "{requests:?}");
    }
    assert!(tool("curl").or(tool("wget")).is_some(), "install curl or wget for this test");
}

#[test]
fn zstd_selects_the_smaller_archive() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    if machine.add("zstd") {
        machine.installs(&site, &[]);
        assert!(site.requests()[1].ends_with(".tar.zst"), "{:?}", site.requests());
        assert_eq!(machine.installed(), only_command(&command(VERSION)));
    }
}

#[test]
fn versions_are_chosen_replaced_and_removed() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    site.publish("0.2.0-rc.1", &command("0.2.0-rc.1"));
    let version = |version: &str| machine.installs(&site, &["--version", version]);
    version("v0.1.0");
    assert_eq!(machine.installed(), only_command(&command(VERSION)));
    machine.installs(&site, &[]);
    assert_eq!(machine.installed(), only_command(&command("0.2.0-rc.1")));
    version("0.1.0");
    assert_eq!(machine.installed(), only_command(&command(VERSION)));
    machine.refuses(&site, &["--version", "0.3.0"], "cannot fetch");
    machine.refuses(&site, &["--version", "../0.1.0"], "is not a version");
    machine.refuses(&site, &["--version"], "needs a value");
    machine.refuses(&site, &["--verison", "1"], "unexpected argument");
    let text = machine.installs(&site, &["--uninstall"]);
    assert!(text.contains("removed ") && machine.installed().is_empty(), "{text}");
    machine.refuses(&site, &["--uninstall"], "does not exist");
    let link = machine.0.path("home/.local/bin/unweight");
    symlink("/nowhere/unweight", &link).unwrap();
    machine.installs(&site, &["--uninstall"]);
    assert!(!link.is_symlink());
}

#[test]
fn another_directory_is_used_and_named_only_if_it_is_not_on_path() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    let to = machine.0.path("tools");
    let text = machine.installs(&site, &["--to", to.to_str().unwrap()]);
    assert!(!text.contains("PATH"), "{text}");
    assert_eq!(fs::read_to_string(to.join("unweight")).unwrap(), command(VERSION));
    assert!(!machine.0.path("home/.local").exists());
    let text = machine.installs(&site, &["--uninstall", "--to", to.to_str().unwrap()]);
    assert!(text.contains("removed ") && !to.join("unweight").exists(), "{text}");
}

#[test]
fn damaged_files_are_refused_and_the_installed_command_stays() {
    type Change = fn(Vec<u8>) -> Answer;
    let flipped = |mut bytes: Vec<u8>| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        Answer::Whole(bytes)
    };
    let changes: [(&str, Change); 5] = [
        ("has SHA-256", flipped),
        ("has SHA-256", |bytes| Answer::Whole(bytes[..bytes.len() - 1].into())),
        ("has SHA-256", |_| Answer::Whole(Vec::new())),
        ("cannot fetch", |bytes| Answer::Truncated(bytes)),
        ("has SHA-256", |mut bytes| {
            bytes.push(0);
            Answer::Whole(bytes)
        }),
    ];
    for older in [None, Some("0.0.9")] {
        for (message, change) in changes {
            let (site, machine) = (Site::new(), System::new());
            if let Some(older) = older {
                site.publish(older, &command(older));
                machine.installs(&site, &[]);
            }
            site.publish(VERSION, &command(VERSION));
            site.change_archive(change);
            machine.refuses(&site, &["--version", VERSION], message);
            assert_eq!(machine.installed(), older.map_or_else(BTreeMap::new, |older| only_command(&command(older))));
        }
    }
}

#[test]
fn unsuitable_releases_are_refused() {
    let machine = System::new();
    machine.refuses(&Site::with_release("#!/bin/sh\nexit 127\n"), &[], "does not run on this system");
    machine.refuses(&Site::with_release(&command("0.0.9")), &[], "says 'unweight 0.0.9', not 'unweight 0.1.0'");
    let sums = |text: &str| {
        let site = Site::with_release(&command(VERSION));
        for folder in ["/latest/download", "/download/v0.1.0"] {
            site.put(&format!("{folder}/SHA256SUMS"), Answer::Whole(text.into()));
        }
        site
    };
    let zeros = "0".repeat(64);
    machine.refuses(&sums(&format!("{zeros}  thesis.tex\n")), &[], "lists no archive");
    machine.refuses(&sums(&format!("{zeros}  unweight-0.1.0-riscv64-unknown-linux-gnu.tar.gz\n")), &[], "no build for");
    let newer = format!("{zeros}  unweight-0.2.0-{}-unknown-linux-gnu.tar.gz\n", env::consts::ARCH);
    machine.refuses(&sums(&newer), &["--version", "0.1.0"], "is of version 0.2.0, not 0.1.0");
}

#[test]
fn without_a_network_nothing_changes() {
    let machine = System::new();
    let mut site = Site::new();
    machine.refuses(&site, &[], "cannot fetch");
    // A port without a listener.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    site.address = format!("http://{closed}");
    machine.refuses(&site, &[], "check the network");
}

/// The key is the script's, or that of a variable, which has precedence.
#[test]
fn signatures_are_checked_if_minisign_is_installed() {
    let other = format!("{}AAAA", &KEY[..KEY.len() - 4]);
    let keys = [("", Some(KEY)), (KEY, None), (&other, Some(KEY))];
    System::new().refuses(&Site::with_release(&command(VERSION)), &["--require-signature"], "no public key is known");
    for (of_script, of_variable) in keys {
        let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
        let script = machine.0.path("with-key.sh");
        fs::write(&script, script_with_key(of_script)).unwrap();
        let run = |arguments: &[&str]| {
            let mut command = machine.script(&site.address, arguments);
            command.stdin(fs::File::open(&script).unwrap()).envs(of_variable.map(|key| ("UNWEIGHT_PUBLIC_KEY", key)));
            let output = command.output().unwrap();
            let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
            (output.status.success(), text)
        };
        let (success, text) = run(&["--require-signature"]);
        assert!(!success && text.contains("cannot check the signature: minisign is not installed"), "{text}");
        let (success, text) = run(&[]);
        assert!(success && text.contains("signature: not checked, minisign is not installed"), "{text}");
        machine.installs(&site, &["--uninstall"]);

        // `cargo xtask test-release` tests the real program.
        let checks = format!(r#"[ "$*" = "-V -P {KEY} -m $5 -x $5.minisig" ] && grep -q good "$7""#);
        machine.fake("minisign", &format!("#!/bin/sh\nPATH={}\n{checks}\n", env::var("PATH").unwrap()));
        for (signature, good) in [(None, false), (Some("forged"), false), (Some("good"), true)] {
            if let Some(signature) = signature {
                site.put("/latest/download/SHA256SUMS.minisig", Answer::Whole(signature.into()));
            }
            let (success, text) = run(&["--require-signature"]);
            assert_eq!((success, !machine.installed().is_empty()), (good, good), "{signature:?}: {text}");
            let message = match signature {
                None => "cannot fetch",
                Some("forged") => "is not by RWT",
                Some(_) => "signature: by RWT",
            };
            assert!(text.contains(message), "{text}");
        }
    }
}

#[test]
fn systems_without_a_build_are_refused_by_name() {
    let site = Site::with_release(&command(VERSION));
    let uname = |system: &str, machine: &str| format!("#!/bin/sh\n[ $1 = -s ] && echo {system} || echo {machine}\n");
    for (program, text, message) in [
        ("uname", uname("Darwin", "arm64"), "Darwin is not supported"),
        ("uname", uname("Linux", "riscv64"), "no build for riscv64"),
        ("ldd", "#!/bin/sh\necho 'musl libc (x86_64)' >&2; exit 1\n".into(), "no build for musl libc"),
        ("ldd", "#!/bin/sh\necho 'ldd (GNU libc) 2.12'\n".into(), "glibc '2.12' is too old"),
        ("ldd", "#!/bin/sh\necho 'ldd (GNU libc) 1.99'\n".into(), "glibc '1.99' is too old"),
        ("ldd", "#!/bin/sh\necho something else\n".into(), "cannot tell which C library"),
        ("getconf", "#!/bin/sh\necho glibc 2.12\n".into(), "glibc '2.12' is too old"),
    ] {
        let machine = System::new();
        if program == "ldd" {
            machine.remove("getconf");
        }
        machine.fake(program, &text);
        machine.refuses(&site, &[], message);
    }
    for version_line in [
        "ldd (Debian GLIBC 2.36-9+deb12u4) 2.36",
        "ldd (Ubuntu GLIBC 2.39-0ubuntu8) 2.39",
        "ldd (Gentoo 2.39-r6 (patchset 5)) 2.39",
        "ldd (GNU libc) 3.1",
    ] {
        // getconf of musl fails.
        for getconf in [None, Some("#!/bin/sh\necho 'unknown variable' >&2; exit 1\n")] {
            let machine = System::new();
            machine.remove("getconf");
            if let Some(text) = getconf {
                machine.fake("getconf", text);
            }
            machine.fake("ldd", &format!("#!/bin/sh\necho '{version_line}'\n"));
            machine.installs(&site, &[]);
        }
    }
    let machine = System::new();
    machine.fake("getconf", "#!/bin/sh\necho glibc 2.39\n");
    machine.fake("ldd", "#!/bin/sh\necho a text of another distribution\n");
    machine.installs(&site, &[]);
    let machine = System::new();
    machine.remove("sha256sum");
    machine.refuses(&site, &[], "neither sha256sum nor shasum is installed");
    machine.remove("gzip");
    machine.refuses(&site, &[], "gzip is not installed");
    machine.remove("tar");
    machine.refuses(&site, &[], "tar is not installed");
}

#[test]
fn musl_gets_its_own_build_and_is_told_what_it_lacks() {
    let (site, machine) = (Site::new(), System::new());
    site.publish_for("musl", VERSION, &command(VERSION));
    machine.remove("getconf");
    machine.fake("ldd", "#!/bin/sh\necho 'musl libc (x86_64)' >&2; exit 1\n");
    let text = machine.installs(&site, &[]);
    assert!(text.contains("has the commands that need no GPU"), "{text}");
    assert!(site.requests().iter().any(|path| path.ends_with("-linux-musl.tar.gz")), "{:?}", site.requests());
}

/// As machines with an old or unknown C library, or with glibc where programs do not look for it.
#[test]
fn without_a_usable_glibc_the_static_build_is_installed() {
    let with_both = |gnu: &str| {
        let site = Site::new();
        site.publish_for("musl", VERSION, &command(VERSION));
        let sums = |site: &Site| match site.answers.lock().unwrap()["/latest/download/SHA256SUMS"].clone() {
            Answer::Whole(text) => text,
            _ => panic!("a list"),
        };
        let of_musl = sums(&site);
        site.publish_for("gnu", VERSION, gnu);
        let both = [of_musl, sums(&site)].concat();
        site.put("/latest/download/SHA256SUMS", Answer::Whole(both));
        site
    };
    let has_requested = |site: &Site, libc: &str| site.requests().iter().any(|path| path.contains(libc));
    for (program, text, message) in [
        ("getconf", "echo glibc 2.12", "(glibc '2.12' is too old"),
        ("ldd", "echo something else", "(cannot tell which C library"),
    ] {
        let (site, machine) = (with_both(&command(VERSION)), System::new());
        if program == "ldd" {
            machine.remove("getconf");
        }
        machine.fake(program, &format!("#!/bin/sh\n{text}\n"));
        let text = machine.installs(&site, &[]);
        assert!(text.contains("commands that need no GPU") && text.contains(message), "{text}");
        assert!(has_requested(&site, "musl") && !has_requested(&site, "gnu"), "{:?}", site.requests());
    }
    for (gnu, is_tried) in [("#!/no/such/loader\n", true), ("#!/bin/sh\nexit 1\n", false)] {
        let (site, machine) = (with_both(gnu), System::new());
        machine.fake("getconf", "#!/bin/sh\necho glibc 2.39\n");
        let output = machine.run(&site, &[]);
        assert_eq!((output.status.success(), has_requested(&site, "musl")), (is_tried, is_tried), "{output:?}");
        if is_tried {
            assert!(String::from_utf8_lossy(&output.stdout).contains("(the build for glibc does not run here"));
            assert_eq!(machine.installed(), only_command(&command(VERSION)));
        }
    }
}

/// As a machine with another processor, for which a release has only the static build.
#[test]
fn without_a_build_for_glibc_the_static_one_is_installed() {
    let (site, machine) = (Site::new(), System::new());
    site.publish_for("musl", VERSION, &command(VERSION));
    let text = machine.installs(&site, &[]);
    assert!(text.contains("static build has the commands that need no GPU"), "{text}");
    assert!(site.requests().iter().any(|path| path.ends_with("-linux-musl.tar.gz")), "{:?}", site.requests());
}

/// A page that asks for a login, or a list that was cut, is no reason to report a forged signature.
#[test]
fn what_is_not_a_list_of_digests_is_named() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    machine.fake("minisign", "#!/bin/sh\nexit 1\n");
    let Answer::Whole(sums) = site.answers.lock().unwrap()["/latest/download/SHA256SUMS"].clone() else { panic!() };
    let page = b"<!DOCTYPE html>\n<title>Log in</title>\n".to_vec();
    let cuts = [1, 64, 66, sums.len() - 1].map(|length| sums[..length].to_vec());
    for text in cuts.into_iter().chain([page, Vec::new(), b"0a  short\n".to_vec(), [&sums[..], b"\n"].concat()]) {
        site.put("/latest/download/SHA256SUMS", Answer::Whole(text.clone()));
        let output = machine.script(&site.address, &[]).env("UNWEIGHT_PUBLIC_KEY", KEY).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        let is_named = message.contains("it is not a list of digests") && !message.contains("report");
        assert!(!output.status.success() && is_named, "{:?}: {message}", String::from_utf8_lossy(&text));
    }
}

#[test]
fn a_directory_in_the_place_of_the_command_is_refused() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    fs::create_dir_all(machine.0.path("home/.local/bin/unweight")).unwrap();
    machine.refuses(&site, &[], "home/.local/bin/unweight is a directory");
    assert!(site.requests().is_empty() && machine.0.names("home/.local/bin/unweight").is_empty());
}

#[test]
fn hints_about_path_are_absolute_and_name_a_command_that_is_found_first() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    let bin = fs::canonicalize(&machine.0.0).unwrap().join("bin");
    let text = machine.installs(&site, &["--to", "bin"]);
    assert!(text.contains(&format!("export PATH=\"{}:$PATH\"", bin.display())), "{text}");

    let path = |folders: &[&Path]| env::join_paths(folders).unwrap();
    let (bin, tools, older) = (machine.0.path("bin"), machine.0.path("tools"), machine.0.path("older"));
    let run = |to: &str, folders: &[&Path]| {
        let output = machine.script(&site.address, &["--to", to]).env("PATH", path(folders)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat()
    };
    let slash = machine.0.path("bin/");
    for (to, on_path) in [(&slash, &bin), (&bin, &slash), (&slash, &slash)] {
        let text = run(to.to_str().unwrap(), &[&tools, on_path]);
        assert!(!text.contains("PATH"), "{to:?}, {on_path:?}: {text}");
    }
    fs::create_dir(&older).unwrap();
    write_program(&older.join("unweight"), &command("0.0.9"));
    let text = run("bin", &[&tools, &older, &bin]);
    assert!(text.contains("warning: ") && text.contains("older/unweight, which is earlier on PATH"), "{text}");
    let text = run("bin", &[&tools, &bin, &older]);
    assert!(!text.contains("warning: "), "{text}");
}

/// curl and wget give up on a server that sends nothing, and each of their statuses gets its own message.
#[test]
fn clients_give_up_and_a_full_disk_is_named() {
    let site = Site::with_release(&command(VERSION));
    for (client, options, full) in
        [("curl", "--retry 1 --connect-timeout 10 --speed-time 20", 23), ("wget", "-t 2 -T 20", 3)]
    {
        for (status, message) in [(full, "check the space"), (7, "check the network")] {
            let machine = System::without_client();
            machine.fake(client, &format!("#!/bin/sh\necho \"$*\" > ../log\nexit {status}\n"));
            let log = machine.0.path("log");
            machine.fake(client, &format!("#!/bin/sh\necho \"$*\" > '{}'\nexit {status}\n", log.display()));
            machine.refuses(&site, &[], message);
            assert!(fs::read_to_string(&log).unwrap().contains(options), "{client}");
        }
    }
    if let Some(wget) = tool("wget") {
        let machine = System::without_client();
        let text = format!("case $* in *-T*) exit 139 ;; esac\nexec {} \"$@\"", wget.display());
        machine.fake("wget", &format!("#!/bin/sh\n{text}\n"));
        machine.installs(&site, &[]);
    }
    assert!(System::new().installs(&site, &[]).contains("fetching http://127.0.0.1"));
}

#[test]
fn a_directory_without_programs_and_a_wrong_key_are_named() {
    // The shell gives this status for a program that it must not execute.
    let site = Site::with_release("#!/bin/sh\nexit 126\n");
    System::new().refuses(&site, &[], "is not mounted noexec");
    let site = Site::with_release("#!/bin/sh\necho 'cannot execute binary file: Exec format error'\nexit 126\n");
    System::new().refuses(&site, &[], "is not for this processor");
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    let output = machine.script(&site.address, &[]).env("UNWEIGHT_PUBLIC_KEY", "RWkey").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("'RWkey' is not a public key"), "{text}");
}

#[test]
fn a_signal_leaves_nothing() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    site.change_archive(|_| Answer::Stalls);
    for (signal, status) in [("TERM", 143), ("INT", 130), ("HUP", 129)] {
        let before = site.requests().len();
        let mut child = machine.script_with_signals(&site.address).process_group(0).spawn().unwrap();
        let start = Instant::now();
        while site.requests().len() < before + 2 {
            assert!(start.elapsed() < Duration::from_secs(30), "install.sh did not request the archive");
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(machine.installed().len(), 1, "install.sh has one temporary directory");
        succeeds(Command::new("kill").args([&format!("-{signal}"), "--", &format!("-{}", child.id())]));
        assert_eq!(child.wait().unwrap().code(), Some(status), "{signal}");
        assert!(machine.installed().is_empty(), "{signal}: {:?}", machine.installed().keys());
    }
}

/// Simulates `curl | sh` if the connection breaks.
#[test]
fn a_truncated_script_does_nothing() {
    let (site, machine) = (Site::with_release(&command(VERSION)), System::new());
    let script = fs::read(root().join("install.sh")).unwrap();
    let end = script.trim_ascii_end().len();
    let (part, mut lengths) =
        (machine.0.path("part.sh"), (0..end - "main \"$@\"".len()).step_by(97).collect::<Vec<_>>());
    lengths.push(end - "main \"$@\"".len());
    for length in lengths {
        fs::write(&part, &script[..length]).unwrap();
        machine.script(&site.address, &[]).stdin(fs::File::open(&part).unwrap()).output().unwrap();
        assert!(site.requests().is_empty() && machine.installed().is_empty(), "{length} bytes");
    }
    // Only the last line executes anything.
    machine.installs(&site, &[]);
    assert!(!site.requests().is_empty());
}
