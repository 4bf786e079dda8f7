//! A search that is killed (SIGKILL) at ten random points ends as one that is not, and measures again at most what was
//! being measured.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::Path,
    process::{Child, Command},
    thread,
    time::Duration,
};

use unweight_engine::tune::{
    Answer, Axis, Coordinate, Journal, Limits, Linear, Oracle, OracleError, Paired, Point, Profile, Space, Tuned,
    descend,
};
use unweight_format::testing::Random;

/// Tells the child where to work.
const FOLDER: &str = "UNWEIGHT_TEST_TUNE_FOLDER";

/// How often it is killed.
const KILLS: usize = 10;

fn space() -> Space {
    let linears = [Linear::Qkv, Linear::Output, Linear::Gate, Linear::Up, Linear::Down, Linear::Head];
    let axes = linears.map(|linear| Axis {
        coordinate: Coordinate::Variant(Profile::Easy, linear),
        choices: (0..6).map(|choice| choice.to_string()).collect(),
    });
    Space::new(axes.to_vec()).unwrap()
}

/// Costs that coordinates share, and a line in a file for every measurement that begins.
struct Slow<'a> {
    log: Option<&'a Path>,
}

impl Oracle for Slow<'_> {
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, OracleError> {
        if let Some(log) = self.log {
            let mut log = OpenOptions::new().create(true).append(true).open(log).unwrap();
            log.write_all(format!("{incumbent:?} {challenger:?}\n").as_bytes()).unwrap();
            thread::sleep(Duration::from_millis(3));
        }
        let time = |point: &Point| {
            let place: Vec<u64> = (0..6).map(|axis| point.choice(axis) as u64).collect();
            vec![100.0 + 100.0 * Random::at(&place).uniform(); 3]
        };
        Ok(Answer::Measured(Paired { incumbent_us: time(incumbent), challenger_us: time(challenger) }))
    }
}

fn search(folder: &Path, log: bool) -> Tuned {
    let (space, path) = (space(), folder.join("log"));
    let mut journal = Journal::open(&folder.join("journal"), "key", &space).unwrap();
    let mut oracle = Slow { log: log.then_some(&path) };
    descend(&space, &space.first(), &mut oracle, &mut journal, &Limits::default(), &mut |_| {}).unwrap()
}

/// Not a test by itself: what the other one starts.
#[test]
fn child() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        search(Path::new(&folder), true);
    }
}

fn start(folder: &Path) -> Child {
    let own = std::env::current_exe().unwrap();
    Command::new(own).args(["--exact", "child"]).env(FOLDER, folder).spawn().unwrap()
}

#[test]
fn a_search_survives_kills() {
    let quiet = tempfile::tempdir().unwrap();
    let expected = search(quiet.path(), false);
    let folder = tempfile::tempdir().unwrap();
    let log = || fs::read_to_string(folder.path().join("log")).unwrap_or_default();
    let mut random = Random::new(7);
    for kills in 0..KILLS {
        let before = log().lines().count();
        let mut child = start(folder.path());
        // As soon as it measures, at a random moment.
        while log().lines().count() == before {
            assert!(child.try_wait().unwrap().is_none(), "it ended after {kills} kills: measurements are too quick");
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_micros(random.below(12_000)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(start(folder.path()).wait().unwrap().success());
    let text = fs::read_to_string(quiet.path().join("journal")).unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("journal")).unwrap(), text, "the journals are the same");
    let extra = log().lines().count() - (text.lines().count() - 1);
    assert!(extra <= KILLS, "{extra} measured again after {KILLS} kills");
    let again = search(folder.path(), true);
    assert_eq!((again.best, again.taken, again.measured), (expected.best, expected.taken, 0));
}
