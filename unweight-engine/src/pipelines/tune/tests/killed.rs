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
const PATIENCE: Duration = Duration::from_secs(60);
/// The environment variable with the child's folder.
const FOLDER: &str = "UNWEIGHT_TEST_TUNE_FOLDER";
/// The environment variable with the number of comparisons, those of the journal included, after which the child waits
/// to be killed.
const LIMIT: &str = "UNWEIGHT_TEST_TUNE_LIMIT";

fn searched() -> Space {
    space([3, 3, 4, 6, 2, 5])
}

/// Logs each comparison before it is measured, so that a measurement whose answer was lost is visible, too.
struct Slow<O> {
    of: O,
    asked: fs::File,
    before_limit: usize,
}

impl<O: Objective> Objective for Slow<O> {
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError> {
        writeln!(self.asked, "{incumbent:?} {challenger:?}").map_err(|error| ObjectiveError(error.into()))?;
        sleep(if self.before_limit == 0 { PATIENCE } else { MEASUREMENT });
        self.before_limit = self.before_limit.saturating_sub(1);
        self.of.compare(incumbent, challenger)
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
fn a_search_to_be_killed() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let limit: usize = env::var(LIMIT).unwrap().parse().unwrap();
    let (space, journal) = (searched(), folder.join("journal"));
    let asked = OpenOptions::new().append(true).create(true).open(folder.join("asked")).unwrap();
    let before_limit = limit.saturating_sub(lines(&journal).saturating_sub(1));
    let mut objective = Slow { of: Invented::new(separable(&space, 4)), asked, before_limit };
    let tuned = search(&space, &mut objective, &journal).unwrap();
    fs::write(folder.join("result"), result(&tuned)).unwrap();
}

fn begin(folder: &Path, limit: usize) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "pipelines::tune::tests::killed::a_search_to_be_killed", "--ignored"]);
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
    let (space, undisturbed, folder) = (searched(), folder(), folder());
    let whole = undisturbed.path().join("journal");
    let mut objective = Invented::new(separable(&space, 4));
    let expected = search(&space, &mut objective, &whole).unwrap();
    let (all, whole) = (objective.asked.len(), fs::read(&whole).unwrap());

    let mut random = Random::new(seed);
    let mut points = BTreeSet::new();
    while points.len() < KILLS as usize {
        points.insert(random.below(all as u64 - 2) as usize);
    }
    println!("killed behind these of {all} comparisons: {points:?}");
    let (journal, asked) = (folder.path().join("journal"), folder.path().join("asked"));
    let mut torn = 0;
    for (number, &point) in points.iter().enumerate() {
        let mut child = begin(folder.path(), point + 2);
        let begun = Instant::now();
        // The head is a line of the journal, too.
        while lines(&journal) <= point && point > 0 {
            assert!(begun.elapsed() < PATIENCE, "the child measures nothing");
            assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
            sleep(MEASUREMENT / 20);
        }
        sleep(Duration::from_micros(random.below(2 * MEASUREMENT.as_micros() as u64)));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "it was to be killed");
        let mut left = fs::read(&journal).unwrap_or_default();
        assert!(whole.starts_with(&left), "other lines behind kill {number}");
        let last = left.split_inclusive(|byte| *byte == b'\n').next_back().map_or(0, <[u8]>::len);
        if number % 2 == 1 && left.ends_with(b"\n") {
            left.truncate(left.len() - 1 - random.below(last as u64 - 1) as usize);
            fs::write(&journal, left).unwrap();
            torn += 1;
        }
    }
    let mut child = begin(folder.path(), usize::MAX);
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_to_string(folder.path().join("result")).unwrap(), result(&expected));
    assert!(fs::read(&journal).unwrap() == whole, "another journal");
    // Measurements that a kill or a tear lost were not in the journal; no others are repeated.
    let (asked, most) = (lines(&asked), all + KILLS as usize + torn);
    assert!((all + torn..=most).contains(&asked), "{asked} measurements for {all}, at most {most}");
    let again = search(&space, &mut Invented { lives: Some(0), ..Invented::new(|_: &Point| 0.0) }, &journal).unwrap();
    assert_eq!((again.measured, again.replayed), (0, expected.measured + expected.replayed));
    assert_eq!(result(&again), result(&expected));
}
