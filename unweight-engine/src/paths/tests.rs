//! Ways, settings and plans, without a device.

use proptest::prelude::*;
use unweight_codegen::{
    plan::Plan as KernelPlan,
    spec::{Epilogue, Op, WeightSource},
};

use super::*;
use crate::{
    options::BUCKETS,
    program::{Checked, build},
};

const ARCH: Arch = Arch::Sm90a;
const SMS: u32 = 132;

fn lying(as_what: Lies, [n, k]: [u32; 2], verbatim_rows: u32) -> Lying {
    Lying { as_what, packed: as_what == Lies::Linear, n, k, verbatim_rows }
}

fn mlp(gate: Lies, up: Lies, down: Lies) -> LyingMlp {
    [lying(gate, [14336, 4096], 3), lying(up, [14336, 4096], 5), lying(down, [4096, 14336], 4)]
}

/// HHR-PPR of six layers, the first as it was.
fn hhr_ppr() -> Vec<LyingMlp> {
    let raw = mlp(Lies::Raw, Lies::Raw, Lies::Raw);
    let hard = mlp(Lies::Huffman, Lies::Huffman, Lies::Raw);
    let easy = mlp(Lies::Palette, Lies::Palette, Lies::Raw);
    vec![raw, easy, hard, easy, hard, easy]
}

#[test]
fn ways_have_names() {
    let of = lying(Lies::Huffman, [14336, 4096], 9);
    for way in of.ways(ARCH, 64) {
        assert_eq!(way.to_string().parse(), Ok(way));
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
        "packed/n1p6",
        "\u{661}",
    ] {
        assert!(text.parse::<Way>().is_err(), "{text}");
    }
}

/// Every way of every form has its kernel where it needs one: of the source that the path reads, with room for the
/// verbatim rows, at sides that it divides.
#[test]
fn every_way_has_its_kernel() {
    for [n, k] in [[14336, 4096], [4096, 14336], [192, 128], [64, 64]] {
        for rows in [0, 3, 8, 9, 64] {
            for m in [1, 16, 17, 64, 256, 1024] {
                for as_what in [Lies::Raw, Lies::Palette, Lies::Huffman, Lies::Linear] {
                    let of = lying(as_what, [n, k], rows);
                    let ways = of.ways(ARCH, m);
                    assert!(!ways.is_empty(), "{of:?}");
                    for way in ways {
                        let variant = of.variant(ARCH, way, Epilogue::StoreAdd);
                        assert_eq!(variant.is_some(), way.ring.is_some(), "{of:?} {way}");
                        let Some(spec) = variant else { continue };
                        let Op::GemmRecon(op) = spec.op else { panic!("{spec}") };
                        let room = match op.source {
                            WeightSource::Exponent => (way.path == Path::Exponents).then_some(64),
                            WeightSource::Palette { verbatim } => {
                                (way.path != Path::Exponents).then_some(verbatim.get())
                            }
                        };
                        assert!(room.is_some_and(|room| room >= rows), "{way}: {spec} for {rows} rows");
                        assert!(n % (64 * op.n_tiles.get()) == 0 && KernelPlan::new(&spec).is_ok());
                        assert!(reachable(&[[of; 3]], ARCH).contains(&spec));
                    }
                }
            }
        }
    }
}

#[test]
fn guesses_follow_the_records() {
    let first = |shape, m| lying(Lies::Huffman, shape, 4).ways(ARCH, m)[0].path;
    assert_eq!(
        [1, 16, 17, 64, 1024].map(|m| first([14336, 4096], m)),
        [Path::Transcode, Path::Transcode, Path::Exponents, Path::Exponents, Path::FullDecode]
    );
    assert_eq!([1, 64, 512].map(|m| first([4096, 14336], m)), [Path::FullDecode; 3]);
}

#[test]
fn what_no_kernel_reads_lies_as_bf16() {
    let of = |form, shape, easy| loads_as(form, shape, easy, ARCH);
    assert_eq!(of(FormId::HUFFMAN, [128, 64], false), Lies::Huffman);
    assert_eq!(of(FormId::HUFFMAN, [128, 64], true), Lies::Palette);
    assert_eq!(of(FormId::PALETTE, [128, 64], false), Lies::Palette);
    assert_eq!(of(FormId::PACKED, [128, 64], false), Lies::Linear);
    assert_eq!(of(FormId::COMPACT, [128, 64], true), Lies::Linear);
    for odd in [[100, 64], [128, 72]] {
        assert_eq!(of(FormId::HUFFMAN, odd, false), Lies::Raw);
        assert_eq!(of(FormId::HUFFMAN, odd, true), Lies::Raw);
        assert_eq!(of(FormId::PALETTE, odd, false), Lies::Raw);
    }
    // An architecture without the report's matmul decodes whole weights.
    assert_eq!(loads_as(FormId::PALETTE, [128, 64], false, Arch::Sm80), Lies::Raw);
    assert_eq!(lying(Lies::Huffman, [128, 64], 0).ways(Arch::Sm80, 1), [Way::plain(Path::FullDecode)]);
}

/// What a setting says is taken where the weight has it, and programs of all of them are sound.
#[test]
fn settings_are_taken_where_weights_have_them() {
    let layers = hhr_ppr();
    for m in BUCKETS {
        let guess = Setting::guess(&layers, ARCH, m, SMS);
        let all = lying(Lies::Huffman, [14336, 4096], 5).ways(ARCH, m);
        for way in all {
            let setting = Setting { hard: [way; 3], ..guess.clone() };
            let ways = setting.ways(&layers, ARCH, m);
            for (layer, ways) in layers.iter().zip(&ways) {
                if is_hard(layer) {
                    assert_eq!(ways[..2], [way; 2]);
                    assert_eq!(ways[2].path, Path::Raw, "a raw weight has no other way");
                } else {
                    assert!(ways.iter().all(|way| matches!(way.path, Path::Raw | Path::Palette)));
                }
            }
            let mlps: Vec<_> = ways.iter().map(|ways| ways.map(|way| way.path)).collect();
            Checked::new(build(&mlps, &setting.layout(SMS)).unwrap()).unwrap();
        }
    }
}

fn plan() -> Plan {
    let mut plan = Plan::default();
    for batch in [64, 1, 1024, 64] {
        let setting = Setting::guess(&hhr_ppr(), ARCH, batch, SMS);
        let key = format!("{batch:032x}");
        plan.insert(Measured { batch, key, setting, step_us: f64::from(batch), gain: 0.125 });
    }
    plan
}

#[test]
fn plans_come_back() {
    let plan = plan();
    assert_eq!(plan.settings().iter().map(|own| own.batch).collect::<Vec<_>>(), [1, 64, 1024]);
    assert_eq!(Plan::parse(plan.text().as_bytes()), Ok(plan.clone()));
    assert!(plan.setting(64, &format!("{:032x}", 64)).is_some());
    assert!(plan.setting(64, &format!("{:032x}", 1)).is_none(), "measured for something else");
    assert!(plan.setting(8, &format!("{:032x}", 64)).is_none());
}

#[test]
fn what_is_wrong_with_a_plan_is_named() {
    let text = plan().text();
    let broken = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        Plan::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err().to_string()
    };
    for (from, to, what) in [
        ("\"version\": 1", "\"version\": 2", "version 2"),
        ("\"batch\": 1,", "\"batch\": 3,", "batch is not"),
        ("\"batch\": 64", "\"batch\": 1", "stands behind"),
        ("\"consumers\": 2", "\"consumers\": 3", "consumers is not 1 or 2"),
        ("\"decode_sms\": 22", "\"decode_sms\": 0", "decode_sms is not"),
        ("\"step_us\": 1.0", "\"step_us\": -1.0", "step_us is not"),
        ("\"gain\": 0.125", "\"gain\": 1e300", "gain is not"),
        ("\"raw\"", "\"rm -rf\"", "'rm -rf' is no path"),
        ("\"key\": \"0000", "\"key\": \"000", "key is not 32"),
        ("\"consumers\"", "\"consumer\"", "unknown field"),
    ] {
        let error = broken(from, to);
        assert!(error.contains(what) && error.contains("tune the bundle again"), "{error}");
    }
    assert!(matches!(Plan::parse(&vec![b' '; 1 << 20]), Err(PlanError::TooLarge(_))));
    assert!(matches!(Plan::parse(&[b'['; 60_000]), Err(PlanError::Json(_))), "deep nesting");
}

proptest! {
    /// Hostile bytes are refused, or are a plan whose settings make programs that are sound.
    #[test]
    fn hostile_plans_never_crash(at in 0..4000usize, byte: u8, cut in 0..4000usize) {
        let mut bytes = plan().text().into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        bytes.truncate(bytes.len() - cut % 3 * 100);
        if let Ok(plan) = Plan::parse(&bytes) {
            for Measured { batch, setting, .. } in plan.settings() {
                let mlps: Vec<_> =
                    setting.ways(&hhr_ppr(), ARCH, *batch).iter().map(|ways| ways.map(|way| way.path)).collect();
                if let Ok(program) = build(&mlps, &setting.layout(SMS)) {
                    prop_assert_eq!(Checked::new(program).err(), None);
                }
            }
        }
    }
}
