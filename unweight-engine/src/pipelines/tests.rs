//! Pipeline variants, settings and plans, without a device.

use proptest::prelude::*;
use unweight_codegen::{
    plan::Plan as KernelPlan,
    spec::{Epilogue, JoinSource, Op, WeightSource},
};
use unweight_format::{bundle::PLAN_BYTES_MAX, testing::Random};
use unweight_rt::DeviceInfo;

use super::{
    step_graph::{CheckedGraph, build},
    tune::{Answer, Axis, Journal, Limits, Objective, ObjectiveError, Paired, Point, descend},
    *,
};
use crate::options::{BUCKETS, Measured, Placement, Plan};

const ARCH: Arch = Arch::Sm90a;
const SMS: u32 = 132;

fn loaded(loaded_as: LoadedAs, [n, k]: [u32; 2], verbatim_rows: u32) -> LoadedProjection {
    LoadedProjection { loaded_as, packed: loaded_as == LoadedAs::Linear, n, k, verbatim_rows }
}

fn mlp(gate: LoadedAs, up: LoadedAs, down: LoadedAs) -> LoadedMlp {
    [loaded(gate, [14336, 4096], 3), loaded(up, [14336, 4096], 5), loaded(down, [4096, 14336], 4)]
}

/// Six layers in the report's HHR-PPR pattern, of which the first is raw.
fn alternating_layers() -> Vec<LoadedMlp> {
    let raw = mlp(LoadedAs::Bf16, LoadedAs::Bf16, LoadedAs::Bf16);
    let hard = mlp(LoadedAs::Huffman, LoadedAs::Huffman, LoadedAs::Bf16);
    let easy = mlp(LoadedAs::Palette, LoadedAs::Palette, LoadedAs::Bf16);
    vec![raw, easy, hard, easy, hard, easy]
}

#[test]
fn pipeline_variants_have_names() {
    let projection = loaded(LoadedAs::Huffman, [14336, 4096], 9);
    let narrow = loaded(LoadedAs::Palette, [4096, 14336], 9).variants(ARCH, 64, SMS);
    assert!(narrow.iter().any(|variant| variant.to_string() == "palette/n1p6s2"), "{narrow:?}");
    let small = loaded(LoadedAs::Palette, [14336, 4096], 9).variants(ARCH, 1, SMS);
    assert_eq!(small[0].to_string(), "palette/b8_r4w8p1c1");
    for variant in projection.variants(ARCH, 64, SMS).into_iter().chain(narrow).chain(small) {
        assert_eq!(variant.to_string().parse(), Ok(variant));
    }
    for text in [
        "",
        "raw/",
        "raw/n2p4",
        "exponents",
        "exponents/n2",
        "exponents/n02p4",
        "exponents/n2p4 ",
        "n2p4",
        "exponents/n200p4",
        "exponents/n-2p4",
        "palette/n2p4p4",
        "palette/n1p6s1",
        "palette/n1p6s",
        "palette/n1p6s2s2",
        "packed/n1p6",
        "palette/b8_r4w8p2",
        "palette/b8r4w8p2c1",
        "palette/b08_r4w8p2c1",
        "palette/b8_r4w8p2c1s2",
        "\u{661}",
    ] {
        assert!(text.parse::<PipelineVariant>().is_err(), "{text}");
    }
}

/// Every variant of every encoding that needs a kernel has one: its source is the one that the pipeline reads, it has
/// room for the verbatim rows, and its tiles divide the sides.
#[test]
fn every_pipeline_variant_has_its_kernel() {
    for [n, k] in [[14336, 4096], [4096, 14336], [192, 128], [64, 64]] {
        for rows in [0, 3, 8, 9, 64] {
            for m in [1, 16, 17, 64, 256, 1024] {
                for loaded_as in [LoadedAs::Bf16, LoadedAs::Palette, LoadedAs::Huffman, LoadedAs::Linear] {
                    let projection = loaded(loaded_as, [n, k], rows);
                    let variants = projection.variants(ARCH, m, SMS);
                    assert!(!variants.is_empty(), "{projection:?}");
                    for variant in variants {
                        let kernel = projection.kernel(ARCH, variant, Epilogue::StoreAdd);
                        assert_eq!(kernel.is_some(), variant.ring.is_some(), "{projection:?} {variant}");
                        let Some(spec) = kernel else { continue };
                        let (is_palette, rows_max, tiles) = match spec.op {
                            Op::GemmRecon(op) => match op.source {
                                WeightSource::Exponent => (false, 64, op.n_tiles.get()),
                                WeightSource::Palette { verbatim } => (true, verbatim.get(), op.n_tiles.get()),
                            },
                            Op::GemmJoin(op) => {
                                assert!(m <= op.batch_tile.get(), "{spec} reads the weights again");
                                (op.source == JoinSource::Palette, 64, 1)
                            }
                            _ => panic!("{spec}"),
                        };
                        assert_eq!(is_palette, variant.pipeline != Pipeline::Exponents, "{variant}: {spec}");
                        assert!(rows_max >= rows, "{variant}: {spec} for {rows} rows");
                        assert!(n % (64 * tiles) == 0 && KernelPlan::new(&spec).is_ok());
                        assert!(reachable(&[[projection; 3]], ARCH).contains(&spec));
                    }
                }
            }
        }
    }
}

#[test]
fn default_settings_follow_the_measurements() {
    let first = |shape, m| loaded(LoadedAs::Huffman, shape, 4).variants(ARCH, m, SMS)[0].pipeline;
    assert_eq!(
        [1, 16, 17, 64, 1024].map(|m| first([14336, 4096], m)),
        [Pipeline::Transcode, Pipeline::Transcode, Pipeline::Exponents, Pipeline::Exponents, Pipeline::FullDecode]
    );
    assert_eq!(
        [1, 32, 64, 512].map(|m| first([4096, 14336], m)),
        [Pipeline::Transcode, Pipeline::Exponents, Pipeline::FullDecode, Pipeline::FullDecode]
    );
}

/// If there are fewer tiles than multiprocessors, blocks split k, unless decoders leave too few multiprocessors.
#[test]
fn default_settings_split_k_by_shape() {
    let palettes = |up: LoadedAs| vec![mlp(up, up, LoadedAs::Palette)];
    let down = |layers: &[LoadedMlp], m| {
        let guess = Setting::guess(layers, ARCH, m, SMS);
        let [hard, easy] = [guess.hard[2], guess.easy[2]];
        (if is_hard(&layers[0]) { hard } else { easy }).to_string()
    };
    assert_eq!(down(&palettes(LoadedAs::Palette), 64), "palette/b64_r2w8p2c1");
    assert_eq!(down(&palettes(LoadedAs::Palette), 65), "palette/n1p6s2");
    assert_eq!(down(&palettes(LoadedAs::Palette), 256), "palette/n1p6");
    assert_eq!(down(&palettes(LoadedAs::Huffman), 65), "palette/n1p6");
}

#[test]
fn encodings_without_kernels_are_placed_as_bf16() {
    let of = |encoding, shape, easy| loads_as(encoding, shape, easy, ARCH);
    assert_eq!(of(EncodingId::HUFFMAN, [128, 64], false), LoadedAs::Huffman);
    assert_eq!(of(EncodingId::HUFFMAN, [128, 64], true), LoadedAs::Palette);
    assert_eq!(of(EncodingId::PALETTE, [128, 64], false), LoadedAs::Palette);
    assert_eq!(of(EncodingId::PACKED, [128, 64], false), LoadedAs::Linear);
    assert_eq!(of(EncodingId::COMPACT, [128, 64], true), LoadedAs::Linear);
    for odd in [[100, 64], [128, 72]] {
        assert_eq!(of(EncodingId::HUFFMAN, odd, false), LoadedAs::Bf16);
        assert_eq!(of(EncodingId::HUFFMAN, odd, true), LoadedAs::Bf16);
        assert_eq!(of(EncodingId::PALETTE, odd, false), LoadedAs::Bf16);
    }
    // An architecture without the reconstructive matmul decodes whole weights.
    assert_eq!(loads_as(EncodingId::PALETTE, [128, 64], false, Arch::Sm80), LoadedAs::Bf16);
    assert_eq!(
        loaded(LoadedAs::Huffman, [128, 64], 0).variants(Arch::Sm80, 1, SMS),
        [PipelineVariant::plain(Pipeline::FullDecode)]
    );
}

/// A weight uses the variant of a setting if it has that variant, and the step graphs of all variants are sound.
#[test]
fn settings_apply_to_weights_that_support_them() {
    let layers = alternating_layers();
    for m in BUCKETS {
        let guess = Setting::guess(&layers, ARCH, m, SMS);
        let all = loaded(LoadedAs::Huffman, [14336, 4096], 5).variants(ARCH, m, SMS);
        for variant in all {
            let setting = Setting { hard: [variant; 3], ..guess.clone() };
            let variants = setting.variants(&layers, ARCH, m, SMS);
            for (layer, variants) in layers.iter().zip(&variants) {
                if is_hard(layer) {
                    assert_eq!(variants[..2], [variant; 2]);
                    assert_eq!(variants[2].pipeline, Pipeline::Raw, "raw weights have one variant");
                } else {
                    assert!(
                        variants.iter().all(|variant| matches!(variant.pipeline, Pipeline::Raw | Pipeline::Palette))
                    );
                }
            }
            let mlps: Vec<_> = variants.iter().map(|variants| variants.map(|variant| variant.pipeline)).collect();
            CheckedGraph::new(build(&mlps, &setting.layout(SMS)).unwrap()).unwrap();
        }
    }
}

/// If the first layer is raw, the choices are those of the easy layers after it.
#[test]
fn raw_first_layer_keeps_the_choices_of_others() {
    let [hard, easy] = choices(&alternating_layers(), ARCH, 64, SMS);
    assert!(hard[..2].iter().all(|variants| variants.iter().any(|variant| variant.pipeline == Pipeline::Exponents)));
    assert!(
        easy[..2]
            .iter()
            .all(|variants| variants.len() > 3 && variants.iter().all(|variant| variant.pipeline == Pipeline::Palette))
    );
    assert_eq!(
        (&hard[2], &easy[2]),
        (&vec![PipelineVariant::plain(Pipeline::Raw)], &vec![PipelineVariant::plain(Pipeline::Raw)])
    );
    let guess = Setting::guess(&alternating_layers(), ARCH, 64, SMS);
    assert_eq!((guess.easy[0].pipeline, guess.hard[0].pipeline), (Pipeline::Palette, Pipeline::Exponents));
    assert!(choices(&[], ARCH, 1, SMS).iter().flatten().all(Vec::is_empty));
}

/// Points and settings convert into each other, the first point is the best guess, and all points have sound step
/// graphs.
#[test]
fn points_are_settings() {
    let layers = alternating_layers();
    let mut random = Random::new(3);
    for m in BUCKETS {
        let guess = Setting::guess(&layers, ARCH, m, SMS);
        let space = SettingSpace::new(&choices(&layers, ARCH, m, SMS), &guess, SMS);
        assert!(!space.is_trivial());
        assert_eq!(space.setting(&space.space().first()), guess);
        assert_eq!(space.point(&guess), space.space().first());
        for _ in 0..50 {
            let axes = space.space().axes().iter();
            let names: Vec<&str> =
                axes.map(|axis| axis.choices[random.below(axis.choices.len() as u64) as usize].as_str()).collect();
            let point = space.space().point(&names).unwrap();
            let setting = space.setting(&point);
            assert_eq!(space.point(&setting), point, "{setting:?}");
            let mlps: Vec<_> = setting
                .variants(&layers, ARCH, m, SMS)
                .iter()
                .map(|variants| variants.map(|variant| variant.pipeline))
                .collect();
            CheckedGraph::new(build(&mlps, &setting.layout(SMS)).unwrap()).unwrap();
        }
        // Values that cannot be chosen become the best guess.
        let odd = Setting { decode_sms: 7, hard: ["palette/n4p2".parse().unwrap(); 3], ..guess.clone() };
        assert_eq!(space.setting(&space.point(&odd)), guess);
    }
    let packed = vec![mlp(LoadedAs::Linear, LoadedAs::Linear, LoadedAs::Linear); 3];
    let guess = Setting::guess(&packed, ARCH, 1, SMS);
    assert!(SettingSpace::new(&choices(&packed, ARCH, 1, SMS), &guess, SMS).is_trivial());
}

/// A search over the space of a real model with invented times: from the worst point to near the best. Repeated from
/// its journal, it measures nothing.
#[test]
fn search_over_variants_improves_a_bad_setting() {
    struct FakeObjective<'a> {
        space: &'a SettingSpace,
        comparisons: u32,
    }
    impl FakeObjective<'_> {
        fn us(&self, point: &Point) -> f64 {
            let Setting { hard, easy, decode_sms, consumers } = self.space.setting(point);
            let variants = hard.iter().chain(&easy).map(|variant| {
                let text = variant.to_string();
                text.bytes().fold(7_u64, |sum, byte| sum * 31 % 1009 + u64::from(byte)) as f64
            });
            1000.0 + variants.sum::<f64>() + f64::from(decode_sms.abs_diff(32)) * 20.0 + f64::from(2 - consumers) * 50.0
        }
    }
    impl Objective for FakeObjective<'_> {
        fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError> {
            self.comparisons += 1;
            let [incumbent, challenger] = [incumbent, challenger].map(|point| vec![self.us(point); 3]);
            Ok(Answer::Measured(Paired { incumbent_us: incumbent, challenger_us: challenger }))
        }
    }
    let layers = alternating_layers();
    let guess = Setting::guess(&layers, ARCH, 64, SMS);
    let space = SettingSpace::new(&choices(&layers, ARCH, 64, SMS), &guess, SMS);
    let axes = space.space().axes();
    // The worst choice of every axis, because times are sums.
    let mut bad = space.space().first();
    let objective = FakeObjective { space: &space, comparisons: 0 };
    for (axis, Axis { choices, .. }) in axes.iter().enumerate() {
        let worst = (0..choices.len()).map(|choice| bad.with(axis, choice));
        bad = worst.max_by(|a, b| objective.us(a).total_cmp(&objective.us(b))).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let search = |objective: &mut FakeObjective<'_>| {
        let mut journal = Journal::open(&folder.path().join("journal"), "key", space.space(), &bad).unwrap();
        descend(space.space(), &bad, objective, &mut journal, &Limits::default(), &mut |_| {}).unwrap()
    };
    let mut objective = FakeObjective { space: &space, comparisons: 0 };
    let tuned = search(&mut objective);
    assert_eq!(objective.comparisons, tuned.measured);
    assert!(tuned.gain > 0.3 && tuned.rejected == 0, "{}", tuned.gain);
    // Times are sums, so no choice of a single axis is significantly better.
    let best = objective.us(&tuned.best);
    for (axis, Axis { choices, .. }) in axes.iter().enumerate() {
        assert!((0..choices.len()).all(|choice| objective.us(&tuned.best.with(axis, choice)) > best * 0.994));
    }
    let mut objective = FakeObjective { space: &space, comparisons: 0 };
    let again = search(&mut objective);
    assert_eq!((again.best, objective.comparisons, again.measured), (tuned.best, 0, 0));
}

fn plan() -> Plan {
    let mut plan = Plan::default();
    for batch in [64, 1, 1024, 64] {
        let setting = Setting::guess(&alternating_layers(), ARCH, batch, SMS);
        let (key, device, basis) = (format!("{batch:032x}"), "a card".to_owned(), "0".repeat(32));
        plan.insert(Measured { batch, key, device, basis, setting, step_us: f64::from(batch), gain: 0.125 });
    }
    plan
}

#[test]
fn plans_parse_back() {
    let plan = plan();
    assert_eq!(plan.settings().iter().map(|measured| measured.batch).collect::<Vec<_>>(), [1, 64, 1024]);
    assert_eq!(Plan::parse(plan.text().as_bytes()), Ok(plan.clone()));
    // Settings of another device or placement do not replace each other.
    let (mut more, key) = (plan.clone(), "f".repeat(32));
    more.insert(Measured { key: key.clone(), ..plan.settings()[1].clone() });
    assert!(more.setting(64, &key).is_some() && more.setting(64, &format!("{:032x}", 64)).is_some());
    assert_eq!(Plan::parse(more.text().as_bytes()), Ok(more));
    assert!(plan.setting(64, &format!("{:032x}", 64)).is_some());
    assert!(plan.setting(64, &format!("{:032x}", 1)).is_none(), "measured for another batch");
    assert!(plan.setting(8, &format!("{:032x}", 64)).is_none());
}

/// Two machines share a bundle, and one of them alternates between two drivers. Then the manifest changes on one of
/// them.
#[test]
fn plans_keep_every_reachable_setting() {
    let info = |name: &str, driver: &str| DeviceInfo {
        ordinal: 0,
        name: name.into(),
        arch: ARCH,
        sms: SMS,
        clock_mhz: 1980,
        memory_mb_per_s: 4_800_000,
        l2_bytes: 60 << 20,
        smem_bytes_per_block: 232_448,
        memory_bytes: 140 << 30,
        driver: driver.into(),
    };
    let of = |model: &str, batch: u32, placement, device: &DeviceInfo| {
        let setting = Setting::guess(&alternating_layers(), ARCH, batch, SMS);
        Measured::new((model, placement), batch, device, setting, (1.0, 0.0))
    };
    let (old, new, other) = (info("one", "12.9"), info("one", "13.0"), info("two", "13.0"));
    let mut plan = Plan::default();
    for device in [&old, &new, &other] {
        for placement in [Placement::Stored, Placement::Alternate] {
            plan.insert(of("m", 1, placement, device));
            plan.insert(of("m", 64, placement, device));
        }
    }
    assert_eq!(plan.settings().len(), 12);
    let key = |placement, batch, device: &DeviceInfo| tuned::key("m", placement, batch, device);
    assert!(plan.setting(64, &key(Placement::Alternate, 64, &old)).is_some());
    // The same setting again adds none.
    plan.insert(of("m", 1, Placement::Stored, &new));
    assert_eq!(plan.settings().len(), 12);
    // Another basis, like that of another version or manifest, removes all settings of this device and no others.
    for _ in 0..3 {
        plan.insert(of("n", 1, Placement::Stored, &new));
        assert_eq!(plan.settings().len(), 5);
    }
    let devices: Vec<_> = plan.settings().iter().map(|measured| measured.device.clone()).collect();
    assert_eq!(devices.iter().filter(|device| device.starts_with("two, ")).count(), 4);
    assert!(plan.setting(1, &tuned::key("n", Placement::Stored, 1, &new)).is_some());
    assert_eq!(Plan::parse(plan.text().as_bytes()), Ok(plan));
}

#[test]
fn invalid_plans_are_explained() {
    let text = plan().text();
    let broken = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Plan::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string()
    };
    for (from, to, what) in [
        ("\"version\": 2", "\"version\": 1", "version 1"),
        ("\"basis\": \"0000", "\"basis\": \"000", "basis is not 32"),
        ("\"a card\"", "\"\"", "device is not 1 to 512"),
        ("\"batch\": 1,", "\"batch\": 3,", "batch is not"),
        ("\"batch\": 1024", "\"batch\": 1", "ascending order"),
        ("\"consumers\": 2", "\"consumers\": 3", "consumers is not 1 or 2"),
        ("\"decode_sms\": 22", "\"decode_sms\": 0", "decode_sms is not"),
        ("\"step_us\": 1.0", "\"step_us\": -1.0", "step_us is not"),
        ("\"gain\": 0.125", "\"gain\": 1e300", "gain is not"),
        ("\"raw\"", "\"rm -rf\"", "'rm -rf' is not a pipeline"),
        ("\"key\": \"0000", "\"key\": \"000", "key is not 32"),
        ("\"consumers\"", "\"consumer\"", "unknown field"),
    ] {
        let error = broken(from, to);
        assert!(error.contains(what) && error.contains("tune the bundle again"), "{error}");
    }
    // Other versions may have any fields: rows of version 1 had no device and no basis.
    for (version, row) in [(1, r#"{"batch":1,"key":"00"}"#), (3, "[]")] {
        let other = format!(r#"{{"version":{version},"settings":[{row}],"more":1}}"#);
        let error = if version < 2 { PlanError::Version(version) } else { PlanError::Newer(version) };
        assert_eq!(Plan::parse(other.as_bytes()), Err(error));
    }
    assert!(matches!(Plan::parse(&vec![b' '; PLAN_BYTES_MAX + 1]), Err(PlanError::TooLarge(_))));
    assert!(matches!(Plan::parse(&[b'['; 60_000]), Err(PlanError::Json(_))), "deep nesting");
}

/// A newer plan is never replaced, an unreadable one is. Before a search begins there is room for its settings, or an
/// error.
#[test]
fn plans_are_extended_without_losing_settings() {
    let (text, kept) = (plan().text(), plan().settings().len());
    assert_eq!(Plan::to_add_to(None, 10), Ok(Plan::default()));
    assert_eq!(Plan::to_add_to(Some(&text), 10).map(|plan| plan.settings().len()), Ok(kept));
    for (version, error) in [(1, None), (3, Some(PlanError::Newer(3))), (u32::MAX, Some(PlanError::Newer(u32::MAX)))] {
        let other = text.replacen("\"version\": 2", &format!("\"version\": {version}"), 1);
        assert_eq!(Plan::to_add_to(Some(&other), 10).err(), error);
    }
    for damaged in ["", "{", &" ".repeat(PLAN_BYTES_MAX + 1)] {
        assert_eq!(Plan::to_add_to(Some(damaged), 10), Ok(Plan::default()));
    }
    // Settings of many devices exceed 64 KiB, and no setting takes more bytes than it is counted with.
    let mut many = Plan::default();
    let worst = Measured {
        batch: 1024,
        key: "f".repeat(32),
        device: "\u{1}".repeat(512),
        basis: "f".repeat(32),
        setting: plan().settings()[0].setting.clone(),
        step_us: f64::MAX,
        gain: -1.0 / 3.0,
    };
    let empty = many.text().len();
    let mut added = 0;
    let full = loop {
        if let Err(error) = Plan::to_add_to(Some(&many.text()), 1) {
            break error;
        }
        many.insert(Measured { key: format!("{added:032x}"), ..worst.clone() });
        added += 1;
        if added == 64 {
            let text = many.text();
            assert!(text.len() > 64 << 10 && text.len() - empty < added * (4 << 10), "{}", text.len());
            assert_eq!(Plan::parse(text.as_bytes()).as_ref(), Ok(&many));
        }
    };
    assert!(matches!(full, PlanError::Full { bytes, more: 1 } if bytes < PLAN_BYTES_MAX), "{full}");
}

proptest! {
    /// Hostile bytes are rejected, or parse to a plan whose settings have sound step graphs.
    #[test]
    fn hostile_plans_never_crash(at in 0..4000usize, byte: u8, cut in 0..4000usize) {
        let mut bytes = plan().text().into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(bytes.len() - cut % 3 * 100);
        if let Ok(plan) = Plan::parse(&bytes) {
            for Measured { batch, setting, .. } in plan.settings() {
                let mlps: Vec<_> =
                    setting
                        .variants(&alternating_layers(), ARCH, *batch, SMS)
                        .iter()
                        .map(|variants| variants.map(|variant| variant.pipeline))
                        .collect();
                if let Ok(graph) = build(&mlps, &setting.layout(SMS)) {
                    prop_assert_eq!(CheckedGraph::new(graph).err(), None);
                }
            }
        }
    }
}
