//! Compares frequencies and tables with those that transformers computes (`fixtures/make.py`).

use serde_json::Value;
use unweight_model::ModelConfig;

fn bits(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|bits| bits.as_u64().unwrap() as u32).collect()
}

#[test]
fn rope_tables_match_transformers() {
    let cases: Value = serde_json::from_str(include_str!("../fixtures/rope.json")).unwrap();
    for (name, case) in cases.as_object().unwrap() {
        let rope = ModelConfig::from_json(&case["config"], None).unwrap().rope;
        let (expected, got) = (bits(&case["inv_freq_bits"]), rope.inv_freq(131_072));
        assert_eq!(expected.len(), got.len(), "{name}");
        for (i, (&expected, got)) in expected.iter().zip(&got).enumerate() {
            // Of all these frequencies, torch rounds two differently: those of 1e6^(74/128) and 1e4^(40/96).
            let unit = u32::from(rope.theta == 1e6 && i == 37 || rope.dim == 96 && i == 20);
            assert_eq!(expected.abs_diff(got.to_bits()), unit, "{name}, frequency {i}");
        }
        // All bits are equal here. In the whole table of Llama 3.1, 5 of 16.8 million values differ by a unit: f32 ties
        // that depend on torch's cosine.
        let table = rope.table(131_072);
        for (row, position) in bits(&case["positions"]).into_iter().enumerate() {
            for (table, expected) in [(&table.cos, &case["cos_bits"]), (&table.sin, &case["sin_bits"])] {
                let got = table[position as usize * got.len()..].iter().map(|value| u32::from(value.to_bits()));
                let got: Vec<u32> = got.take(expected[row].as_array().unwrap().len()).collect();
                assert_eq!(got, bits(&expected[row]), "{name}, position {position}");
            }
        }
    }
}
