//! A search whose process is killed (SIGKILL) while it measures: ten times, at random points, and restarted each time.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, OpenOptions},
    io::Write,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use super::*;

/// How often the process is killed.
const KILLS: u64 = 10;
/// The time of a measurement, during which most kills happen.
const MEASUREMENT: Duration = Duration::from_millis(2);
/// The time after which a silent process counts as stuck.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The environment variable with the child's directory.
const FOLDER: &str = "UNWEIGHT_TEST_TUNE_FOLDER";
/// The environment variable with the number of comparisons, those of the journal included, after which the child waits
/// to be killed.
const LIMIT: &str = "UNWEIGHT_TEST_TUNE_LIMIT";

fn search_space() -> Space {
    space([3, 3, 4, 6, 2, 5])
}

/// Logs each comparison before it is measured, so that a measurement whose answer was lost is visible, too.
struct Slow<O> {
    inner: O,
    log: fs::File,
    before_limit: usize,
}

impl<O: Objective> Objective for Slow<O> {
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError> {
        writeln!(self.log, "{incumbent:?} {challenger:?}").map_err(|error| ObjectiveError(error.into()))?;
        sleep(if self.before_limit == 0 { TIMEOUT } else { MEASUREMENT });
        self.before_limit = self.before_limit.saturating_sub(1);
        self.inner.compare(incumbent, challenger)
    }
}

fn result(tuned: &Tuned) -> String {
    format!("{:?} {:?} {}", tuned.best, tuned.taken, tuned.gain)
}

fn lines(path: &Path) -> usize {
    fs::read(path).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count())
}

/// The program of the child process.
#[test]
#[ignore = "the process that killed_searches_measure_nothing_twice kills"]
fn search_that_is_killed() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let limit: usize = env::var(LIMIT).unwrap().parse().unwrap();
    let (space, journal) = (search_space(), folder.join("journal"));
    let log = OpenOptions::new().append(true).create(true).open(folder.join("comparisons")).unwrap();
    let before_limit = limit.saturating_sub(lines(&journal).saturating_sub(1));
    let mut objective = Slow { inner: FakeObjective::new(separable(&space, 4)), log, before_limit };
    let tuned = search(&space, &mut objective, &journal).unwrap();
    fs::write(folder.join("result"), result(&tuned)).unwrap();
}

fn begin(folder: &Path, limit: usize) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "pipelines::tune::tests::killed::search_that_is_killed", "--ignored"]);
    command.env(FOLDER, folder).env(LIMIT, limit.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
}

/// No measurement in the journal is repeated, and journal and result equal those of an undisturbed search. After every
/// second kill that tore no line, the test tears the last line. `UNWEIGHT_TEST_SEED` repeats a run, as far as the
/// timing of signals allows.
#[test]
fn killed_searches_measure_nothing_twice() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    let seed = env::var("UNWEIGHT_TEST_SEED").map_or_else(|_| now(), |seed| seed.parse().unwrap());
    println!("UNWEIGHT_TEST_SEED={seed}");
    let (space, reference, folder) = (search_space(), folder(), folder());
    let whole = reference.path().join("journal");
    let mut objective = FakeObjective::new(separable(&space, 4));
    let expected = search(&space, &mut objective, &whole).unwrap();
    let (all, whole) = (objective.comparisons.len(), fs::read(&whole).unwrap());

    let mut random = Random::new(seed);
    let mut points = BTreeSet::new();
    while points.len() < KILLS as usize {
        points.insert(random.below(all as u64 - 2) as usize);
    }
    println!("killed after these of {all} comparisons: {points:?}");
    let (journal, log) = (folder.path().join("journal"), folder.path().join("comparisons"));
    let mut torn = 0;
    for (number, &point) in points.iter().enumerate() {
        let mut child = begin(folder.path(), point + 2);
        let begun = Instant::now();
        // The head is a line of the journal, too.
        while lines(&journal) <= point && point > 0 {
            assert!(begun.elapsed() < TIMEOUT, "the child measures nothing");
            assert!(child.try_wait().unwrap().is_none(), "the child ended before it was killed");
            sleep(MEASUREMENT / 20);
        }
        sleep(Duration::from_micros(random.below(2 * MEASUREMENT.as_micros() as u64)));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "the child was not killed");
        let mut written = fs::read(&journal).unwrap_or_default();
        assert!(whole.starts_with(&written), "unexpected lines after kill {number}");
        let last = written.split_inclusive(|byte| *byte == b'\n').next_back().map_or(0, <[u8]>::len);
        if number % 2 == 1 && written.ends_with(b"\n") {
            written.truncate(written.len() - 1 - random.below(last as u64 - 1) as usize);
            fs::write(&journal, written).unwrap();
            torn += 1;
        }
    }
    let mut child = begin(folder.path(), usize::MAX);
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_to_string(folder.path().join("result")).unwrap(), result(&expected));
    assert!(fs::read(&journal).unwrap() == whole, "the journals differ");
    // Measurements that a kill or a tear lost were not in the journal; no others are repeated.
    let (compared, compared_max) = (lines(&log), all + KILLS as usize + torn);
    assert!(
        (all + torn..=compared_max).contains(&compared),
        "{compared} measurements for {all}, at most {compared_max}"
    );
    let again = search(
        &space,
        &mut FakeObjective { comparisons_left: Some(0), ..FakeObjective::new(|_: &Point| 0.0) },
        &journal,
    )
    .unwrap();
    assert_eq!((again.measured, again.replayed), (0, expected.measured + expected.replayed));
    assert_eq!(result(&again), result(&expected));
}
