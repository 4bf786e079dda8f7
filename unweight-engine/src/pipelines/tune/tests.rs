//! Searches over invented costs: separable, coupled, noisy, rejecting and failing ones; and journals cut off at every
//! line.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
};

use unweight_format::testing::Random;

use super::*;
use crate::options::Projection;

#[cfg(unix)]
mod killed;

const KEY: &str = "0123";

/// Axes of both profiles and of the whole step.
fn space(sizes: [usize; 6]) -> Space {
    let coordinates = [
        Coordinate::Pipeline(Profile::Hard, Projection::Gate),
        Coordinate::Pipeline(Profile::Hard, Projection::Up),
        Coordinate::Pipeline(Profile::Hard, Projection::Down),
        Coordinate::Pipeline(Profile::Easy, Projection::Gate),
        Coordinate::Pipeline(Profile::Easy, Projection::Down),
        Coordinate::DecodeSms,
    ];
    let axes = coordinates
        .into_iter()
        .zip(sizes)
        .map(|(coordinate, size)| Axis { coordinate, choices: (0..size).map(|choice| format!("c{choice}")).collect() });
    Space::new(axes.collect()).unwrap()
}

fn points(space: &Space) -> Vec<Point> {
    space.axes().iter().enumerate().fold(vec![space.first()], |points, (axis, of)| {
        points.iter().flat_map(|point| (0..of.choices.len()).map(|choice| point.with(axis, choice))).collect()
    })
}

/// An objective with invented step times and failures.
struct FakeObjective<C> {
    cost: C,
    /// The standard deviation of the noise, as a share of the cost.
    noise: f64,
    random: Random,
    /// The number of comparisons until the device is lost.
    comparisons_left: Option<u32>,
    is_rejected: fn(&Point) -> bool,
    comparisons: Vec<(Point, Point)>,
}

impl<C: Fn(&Point) -> f64> FakeObjective<C> {
    fn new(cost: C) -> Self {
        Self {
            cost,
            noise: 0.0,
            random: Random::new(9),
            comparisons_left: None,
            is_rejected: |_| false,
            comparisons: Vec::new(),
        }
    }
}

impl<C: Fn(&Point) -> f64> Objective for FakeObjective<C> {
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError> {
        match &mut self.comparisons_left {
            Some(0) => return Err(ObjectiveError("the device is lost".into())),
            Some(comparisons_left) => *comparisons_left -= 1,
            None => {}
        }
        self.comparisons.push((incumbent.clone(), challenger.clone()));
        if (self.is_rejected)(challenger) {
            return Ok(Answer::Unusable("other logits".to_owned()));
        }
        let mut time = |point: &Point| (self.cost)(point) * (1.0 + self.noise * self.random.normal());
        let (mut incumbent_us, mut challenger_us) = (Vec::new(), Vec::new());
        for _ in 0..15 {
            incumbent_us.push(time(incumbent));
            challenger_us.push(time(challenger));
        }
        Ok(Answer::Measured(Paired { incumbent_us, challenger_us }))
    }
}

/// Each choice of each axis has its own share of the time; choices differ by at least 3 % of the total.
fn separable(space: &Space, seed: u64) -> impl Fn(&Point) -> f64 + use<> {
    let mut random = Random::new(seed);
    let shares: Vec<Vec<f64>> = space
        .axes()
        .iter()
        .map(|axis| {
            let mut ranks: Vec<f64> = (0..axis.choices.len()).map(|rank| 100.0 + 30.0 * rank as f64).collect();
            for at in (1..ranks.len()).rev() {
                ranks.swap(at, random.below(at as u64 + 1) as usize);
            }
            ranks
        })
        .collect();
    move |point| shares.iter().enumerate().map(|(axis, shares)| shares[point.choice(axis)]).sum()
}

fn search(space: &Space, objective: &mut dyn Objective, path: &Path) -> Result<Tuned, TuneError> {
    let mut journal = Journal::open(path, KEY, space, &space.first())?;
    descend(space, &space.first(), objective, &mut journal, &Limits::default(), &mut |_| {})
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn separable_costs_are_solved_in_few_comparisons() {
    let space = space([3, 3, 4, 6, 2, 5]);
    let alternatives: usize = space.axes().iter().map(|axis| axis.choices.len() - 1).sum();
    for seed in 0..40 {
        let (folder, cost) = (folder(), separable(&space, seed));
        let best = points(&space).into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap();
        let start = cost(&space.first());
        let mut objective = FakeObjective::new(&cost);
        let tuned = search(&space, &mut objective, &folder.path().join("j")).unwrap();
        assert_eq!(tuned.best, best, "seed {seed}");
        let gain = (start - cost(&best)) / start;
        assert!((tuned.gain - gain).abs() < 1e-9 && (gain > 0.0 || tuned.taken.is_empty()));
        // A sweep with gains, one without, a revisit and a sweep after it, and the confirmation.
        assert!(objective.comparisons.len() <= 4 * alternatives + 1, "{}", objective.comparisons.len());
        assert_eq!(tuned.measured as usize, objective.comparisons.len());
    }
}

/// The expected number of comparisons covers the whole search; it is exact while nothing is gained, and after the last
/// gain.
#[test]
fn expected_measurements_cover_the_whole_search() {
    let space = space([3, 3, 4, 6, 2, 5]);
    for seed in 0..20 {
        let costs = separable(&space, seed);
        for flat in [true, false] {
            let folder = folder();
            let mut journal = Journal::open(&folder.path().join("j"), KEY, &space, &space.first()).unwrap();
            let mut objective = FakeObjective::new(|point: &Point| if flat { 1.0 } else { costs(point) });
            let mut updates = Vec::new();
            let mut watch = |progress: Progress<'_>| {
                updates.push((progress.compared, progress.expected, progress.incumbent.clone()));
            };
            let limits = Limits::default();
            let tuned = descend(&space, &space.first(), &mut objective, &mut journal, &limits, &mut watch).unwrap();
            let all = tuned.measured + tuned.replayed;
            assert_eq!(updates.last().map(|last| (last.0, last.1)), Some((all, all)));
            let settled = updates.iter().filter(|(_, _, incumbent)| *incumbent == tuned.best);
            // Points that were left are not compared again: at most as many as were taken, in a sweep and a revisit.
            let expected_max = all + 2 * tuned.taken.len() as u32;
            assert!(
                settled.clone().all(|(_, expected, _)| (all..=expected_max).contains(expected)),
                "{all}: {updates:?}"
            );
            assert!(!flat || updates.iter().all(|(_, expected, _)| *expected == all), "{updates:?}");
        }
    }
}

/// If coordinates depend on each other, a search may end at a local optimum. Its time always decreases, it never
/// returns to a point, and it ends.
#[test]
fn coupled_costs_decrease_and_terminate() {
    let space = space([3, 3, 3, 4, 4, 4]);
    for seed in 0..60 {
        let cost = |point: &Point| {
            let coordinates: Vec<u64> = (0..6).map(|axis| point.choice(axis) as u64).chain([seed]).collect();
            100.0 + 100.0 * Random::at(&coordinates).uniform()
        };
        let folder = folder();
        let mut objective = FakeObjective::new(cost);
        let tuned = search(&space, &mut objective, &folder.path().join("j")).unwrap();
        let costs: Vec<f64> = [space.first()].iter().chain(&tuned.taken).map(cost).collect();
        assert!(costs.windows(2).all(|pair| pair[1] < pair[0] * 0.995), "seed {seed}: {costs:?}");
        assert_eq!(tuned.taken.iter().collect::<HashSet<_>>().len(), tuned.taken.len());
        assert_eq!(tuned.best, tuned.taken.last().cloned().unwrap_or(space.first()));
    }
}

/// With noise of half a percent per round, where choices differ by a few percent, the result is never slower than the
/// start, and mostly the best. Noise alone is not a gain.
#[test]
fn noise_is_not_a_gain() {
    let space = space([3, 3, 3, 4, 2, 4]);
    let mut best = 0;
    for seed in 0..40 {
        let cost = separable(&space, seed);
        let min_cost = points(&space).iter().map(&cost).fold(f64::INFINITY, f64::min);
        let folder = folder();
        let mut objective = FakeObjective { noise: 0.005, random: Random::new(seed), ..FakeObjective::new(&cost) };
        let tuned = search(&space, &mut objective, &folder.path().join("j")).unwrap();
        assert!(cost(&tuned.best) <= cost(&space.first()), "seed {seed}");
        best += u32::from(cost(&tuned.best) < min_cost * 1.03);
        // If all points are equal, nothing is gained.
        let mut flat =
            FakeObjective { noise: 0.02, random: Random::new(seed), ..FakeObjective::new(|_: &Point| 100.0) };
        let tuned = search(&space, &mut flat, &folder.path().join("flat")).unwrap();
        assert!(tuned.taken.len() <= 2, "seed {seed}: {:?}", tuned.taken);
    }
    assert!(best >= 30, "{best} of 40");
}

#[test]
fn points_that_cannot_run_are_rejected() {
    let space = space([3, 3, 3, 4, 4, 4]);
    for seed in 0..20 {
        let cost = separable(&space, seed);
        let is_rejected: fn(&Point) -> bool = |point| point.choice(1) == 2 || point.choice(4) == point.choice(5) + 1;
        let folder = folder();
        let mut objective = FakeObjective { is_rejected, ..FakeObjective::new(&cost) };
        let tuned = search(&space, &mut objective, &folder.path().join("j")).unwrap();
        assert!(!is_rejected(&tuned.best) && tuned.rejected > 0 && tuned.taken.iter().all(|point| !is_rejected(point)));
    }
}

/// Points with times that are not finite are rejected, and do not spoil the journal.
#[test]
fn nan_times_are_rejected() {
    let (space, folder) = (space([2, 1, 1, 1, 1, 1]), folder());
    for cost in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let path = folder.path().join(cost.to_string());
        let mut objective = FakeObjective::new(|point: &Point| if point.choice(0) == 1 { cost } else { 1.0 });
        let tuned = search(&space, &mut objective, &path).unwrap();
        assert_eq!((&tuned.best, tuned.rejected), (&space.first(), 2));
        assert_eq!(search(&space, &mut objective, &path).unwrap().measured, 0);
    }
}

/// A result that was luck is dropped.
#[test]
fn result_is_never_slower_than_the_start() {
    struct Misleading(u32);
    impl Objective for Misleading {
        fn compare(&mut self, _: &Point, _: &Point) -> Result<Answer, ObjectiveError> {
            self.0 += 1;
            // Only the first measurement of the challenger is better.
            let challenger_us = if self.0 == 1 { vec![50.0; 5] } else { vec![120.0; 5] };
            Ok(Answer::Measured(Paired { incumbent_us: vec![100.0; 5], challenger_us }))
        }
    }
    let (space, folder) = (space([2, 2, 1, 1, 1, 1]), folder());
    let tuned = search(&space, &mut Misleading(0), &folder.path().join("j")).unwrap();
    assert_eq!((tuned.best, tuned.gain, tuned.taken.len()), (space.first(), 0.0, 1));
}

/// After a kill at any comparison, or with any line half written, the result is the same and nothing is measured twice.
#[test]
fn search_resumes_from_every_line() {
    let space = space([3, 3, 2, 4, 2, 3]);
    let cost = separable(&space, 4);
    let folder = folder();
    let whole = folder.path().join("whole");
    let mut objective = FakeObjective::new(&cost);
    let expected = search(&space, &mut objective, &whole).unwrap();
    let all = objective.comparisons.len();
    let text = fs::read(&whole).unwrap();
    let lines: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').collect();
    assert_eq!(lines.len(), all + 1);
    for kept in 0..=lines.len() {
        for torn in [0, 1, 17] {
            let path = folder.path().join(format!("{kept}-{torn}"));
            let mut bytes = lines[..kept].concat();
            // A part of the next line, and never its end.
            bytes.extend(lines.get(kept).map_or(&[][..], |line| &line[..torn.min(line.len() - 1)]));
            fs::write(&path, bytes).unwrap();
            let mut objective = FakeObjective::new(&cost);
            let tuned = search(&space, &mut objective, &path).unwrap();
            assert_eq!((&tuned.best, &tuned.taken), (&expected.best, &expected.taken), "{kept} lines");
            assert_eq!(objective.comparisons.len(), all - kept.saturating_sub(1), "{kept} lines");
            assert_eq!(fs::read(&path).unwrap(), text, "{kept} lines");
        }
    }
    // A device that is lost repeatedly.
    let path = folder.path().join("failing");
    let mut comparisons: HashMap<(Point, Point), u32> = HashMap::new();
    let mut failures = 0;
    let tuned = loop {
        let mut objective = FakeObjective { comparisons_left: Some(3), ..FakeObjective::new(&cost) };
        let ended = search(&space, &mut objective, &path);
        objective.comparisons.into_iter().for_each(|pair| *comparisons.entry(pair).or_default() += 1);
        match ended {
            Ok(tuned) => break tuned,
            Err(TuneError::Objective(error)) => assert_eq!(error.to_string(), "the device is lost"),
            Err(error) => panic!("{error}"),
        }
        failures += 1;
    };
    assert_eq!((tuned.best, tuned.taken), (expected.best, expected.taken));
    assert_eq!(comparisons.values().sum::<u32>() as usize, all);
    assert!(failures >= all / 3 - 1, "{failures}");
}

#[test]
fn invalid_journals_are_rejected() {
    let (space, folder) = (space([2, 2, 1, 1, 1, 1]), folder());
    let path = folder.path().join("j");
    search(&space, &mut FakeObjective::new(separable(&space, 1)), &path).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let open = |text: &str, key: &str| {
        fs::write(&path, text).unwrap();
        Journal::open(&path, key, &space, &space.first())
            .map(|journal| journal.len())
            .map_err(|error| error.to_string())
    };
    assert_eq!(open(&text, KEY), Ok(text.lines().count() - 1));
    for (line, damage) in [(2, "{}"), (1, "x"), (2, ""), (2, "\0\0\0\0")] {
        let mut lines: Vec<&str> = text.lines().collect();
        lines[line - 1] = damage;
        let error = open(&(lines.join("\n") + "\n"), KEY).unwrap_err();
        assert!(error.contains(&format!("j: line {line}: ")) && error.contains("begin with a new file"), "{error}");
    }
    // A file without a whole line is overwritten if it is a prefix of the head; any other belongs to another program.
    let head = text.lines().next().unwrap();
    for torn in ["", &head[..7], head] {
        assert_eq!(open(torn, KEY), Ok(0), "{torn}");
    }
    for other in ["{}", "an unrelated file", &head[1..], &format!("{head} ")] {
        let error = open(other, KEY).unwrap_err();
        assert!(error.contains("j: line 1: neither"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), other);
    }
    let twice = text.clone() + text.lines().last().unwrap() + "\n";
    assert!(open(&twice, KEY).unwrap_err().contains("a second time"));
    assert!(open(&text.replacen("\"c1\"", "\"c7\"", 1), KEY).unwrap_err().contains("cannot be 'c7'"));
    assert!(open(&text.replacen("\"tune\":1", "\"tune\":2", 1), KEY).unwrap_err().contains("version 2"));
    assert!(
        open(&text.replacen("hard.gate.pipeline", "hard.up.pipeline", 1), KEY).unwrap_err().contains("coordinates")
    );
    let other = open(&text, "4567").unwrap_err();
    assert!(other.contains("belong to 0123, not to 4567"), "{other}");
    fs::write(&path, &text).unwrap();
    let again = |path: &Path| Journal::open(path, KEY, &space, &space.first());
    let journal = again(&path).unwrap();
    assert!(matches!(again(&path), Err(JournalError::Busy { .. })));
    drop(journal);
    assert!(again(&path).is_ok());
    // A file without a line that exceeds all memory is not read.
    let huge = folder.path().join("huge");
    fs::File::create(&huge).unwrap().set_len(1 << 40).unwrap();
    let error = again(&huge).unwrap_err();
    assert!(matches!(error, JournalError::TooLarge { bytes: 0x100_0000_0000, .. }), "{error}");
    assert_eq!(huge.metadata().unwrap().len(), 1 << 40);
    let nowhere = folder.path().join("missing").join("j");
    assert!(matches!(again(&nowhere), Err(JournalError::Io { .. })));
}

/// A claim locks the file and checks its key before the search space is known. A dropped claim removes a file that it
/// created, and leaves an existing file unchanged.
#[test]
fn journal_is_locked_before_the_search_space_is_known() {
    let (space, folder) = (space([2, 2, 1, 1, 1, 1]), folder());
    let path = folder.path().join("j");
    let claim = Claim::new(&path).unwrap();
    claim.check(KEY).unwrap();
    assert!(path.exists() && matches!(Claim::new(&path), Err(JournalError::Busy { .. })));
    drop(claim);
    assert!(!path.exists());
    let journal = Claim::new(&path).unwrap().begin(KEY, &space, &space.first()).unwrap();
    assert!(journal.is_empty() && matches!(Claim::new(&path), Err(JournalError::Busy { .. })));
    drop(journal);
    let head = fs::read_to_string(&path).unwrap();
    let checked = |text: &str, key: &str| {
        fs::write(&path, text).unwrap();
        let checked = Claim::new(&path).and_then(|claim| claim.check(key)).map_err(|error| error.to_string());
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        checked
    };
    for prefix in ["", &head[..1], &head[..20], &head[..head.len() - 1], &head] {
        assert_eq!(checked(prefix, KEY), Ok(()), "{prefix}");
    }
    assert!(checked(&head, "4567").unwrap_err().contains("belong to 0123, not to 4567"));
    for (other, expected) in [("mine", "neither a journal"), (&head[..40], "neither"), ("mine\n", "line 1: ")] {
        assert!(checked(other, "4567").unwrap_err().contains(expected), "{other}");
    }
    let below = path.join("j");
    assert!(matches!(Claim::new(&below), Err(JournalError::Io { .. })));
    assert!(matches!(Claim::new(folder.path()), Err(JournalError::NoFile { .. })));
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("absent", &link).unwrap();
    assert!(matches!(Claim::new(&link), Err(JournalError::NoFile { .. })));
    // If a claimed file is removed, its name belongs to the next claim.
    fs::remove_file(&path).unwrap();
    let first = Claim::new(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let second = Claim::new(&path).unwrap().begin(KEY, &space, &space.first()).unwrap();
    drop(first);
    assert!(second.is_empty() && path.exists());
}

/// A torn line is removed before anything is written, because the line that replaces it may be shorter.
#[test]
fn torn_journal_line_is_removed() {
    let (space, folder) = (space([2, 1, 1, 1, 1, 1]), folder());
    let path = folder.path().join("journal");
    let open = || Journal::open(&path, KEY, &space, &space.first()).unwrap();
    drop(open());
    let head = fs::read(&path).unwrap();
    fs::write(&path, [&head[..], &[b'{'; 500]].concat()).unwrap();
    drop(open());
    assert_eq!(fs::read(&path).unwrap(), head);
}

/// A new search starts at the result of an earlier one. The same search, resumed from its journal, starts where it
/// began: it measures nothing twice, and its gain is relative to its own start.
#[test]
fn search_resumes_from_its_own_start() {
    for seed in 0..10 {
        let (space, folder) = (space([3, 3, 4, 6, 2, 5]), folder());
        let path = folder.path().join("j");
        let mut objective = FakeObjective::new(separable(&space, seed));
        let found = search(&space, &mut objective, &path).unwrap();
        assert!(found.gain > 0.0);
        let mut journal = Journal::open(&path, KEY, &space, &found.best).unwrap();
        let start = journal.start().clone();
        assert_eq!(start, space.first());
        let mut objective = FakeObjective { comparisons_left: Some(0), ..objective };
        let again = descend(&space, &start, &mut objective, &mut journal, &Limits::default(), &mut |_| {}).unwrap();
        assert_eq!((again.best, again.gain, again.measured), (found.best, found.gain, 0));
    }
}

#[test]
fn gains_are_medians_of_rounds() {
    let paired = |incumbent: &[f64], challenger: &[f64]| Paired {
        incumbent_us: incumbent.to_vec(),
        challenger_us: challenger.to_vec(),
    };
    // A single disturbed round changes nothing.
    let disturbed = paired(&[100.0; 5], &[98.0, 98.0, 500.0, 98.0, 98.0]);
    assert!(disturbed.is_gain(0.005) && (disturbed.gain().0 - 0.02).abs() < 1e-12);
    assert!(!disturbed.is_gain(0.02), "the gain is not above 2 %");
    // A gain of 2 % with deviations of 1 % may be noise.
    assert!(!paired(&[100.0; 5], &[96.0, 97.0, 98.0, 99.0, 100.0]).is_gain(0.005));
    assert!(!paired(&[], &[]).is_gain(0.0));
    assert!(!paired(&[f64::NAN, 0.0, -1.0, f64::INFINITY], &[1.0; 4]).is_gain(0.0));
    assert_eq!(paired(&[100.0, 100.0], &[75.0, 50.0]).gain().0, 0.375);
}

#[test]
fn invalid_search_spaces_are_rejected() {
    let axis =
        |coordinate, choices: &[&str]| Axis { coordinate, choices: choices.iter().map(|c| c.to_string()).collect() };
    let (a, b) = (Coordinate::Consumers, Coordinate::Pipeline(Profile::Easy, Projection::Up));
    assert_eq!(Space::new(vec![axis(a, &[])]), Err(SpaceError::NoChoices(a)));
    assert_eq!(Space::new(vec![axis(a, &["1"]), axis(a, &["2"])]), Err(SpaceError::Twice(a)));
    let twice = SpaceError::ChoiceTwice { coordinate: b, choice: "x".to_owned() };
    assert_eq!(Space::new(vec![axis(b, &["x", "x"])]), Err(twice));
    let space = Space::new(vec![axis(a, &["1", "2"]), axis(b, &["on", "off"])]).unwrap();
    assert_eq!(space.axes()[0].coordinate, b, "coordinates of profiles come first");
    assert_eq!(space.names(&space.point(&["off", "1"]).unwrap()), ["off", "1"]);
    assert_eq!(space.point(&["off"]), Err(SpaceError::Count { got: 1, axes: 2 }));
    let error = space.point(&["off", "3"]).unwrap_err().to_string();
    assert_eq!(error, "consumers cannot be '3'; valid choices are 1, 2");
    assert_eq!(b.to_string(), "easy.up.pipeline");
}
