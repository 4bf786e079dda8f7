//! Compares layers on the CPU with candle's matmul of the same weights.

use std::{collections::HashMap, path::Path};

use candle_core::{DType, Device, Module, Tensor, Var};
use half::bf16;
use unweight_candle::{Error, UnweightLinear};
use unweight_format::bundle::{Bundle, CompressOptions, Profile, Silent, compress};

const CPU: Device = Device::Cpu;

/// Weights in a bell curve, as in trained models, of which one in 1000 is an outlier near zero.
fn weights(n: usize, k: usize) -> Tensor {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let values = (0..n * k).map(|index| {
        let bell = (0..12).map(|_| next()).sum::<f32>() - 6.0;
        bf16::from_f32(if index % 1000 == 999 { bell * 2f32.powi(-60) } else { bell * 0.02 })
    });
    Tensor::from_vec(values.collect::<Vec<_>>(), (n, k), &CPU).unwrap()
}

fn inputs(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|index| ((index * 37 % 101) as f32 - 50.0) / 25.0).collect();
    Tensor::from_vec(values, shape, &CPU).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// candle's F32 matmul with the same weights.
fn stock(x: &Tensor, weight: &Tensor) -> Tensor {
    let weight = weight.to_dtype(DType::F32).unwrap().t().unwrap();
    x.to_dtype(DType::F32).unwrap().broadcast_matmul(&weight).unwrap()
}

#[test]
fn a_layer_is_the_product_of_its_weights_bit_for_bit() {
    let weight = weights(192, 128);
    let layer = UnweightLinear::of_weight(&weight, None).unwrap();
    assert_eq!((layer.n(), layer.k()), (192, 128));
    assert_eq!(bits(&layer.unpacked().unwrap()), bits(&weight));
    for rows in [1, 2, 7, 33] {
        let x = inputs(&[rows, 128]);
        assert_eq!(bits(&layer.forward(&x).unwrap()), bits(&stock(&x, &weight)), "{rows} rows");
    }
    let x = inputs(&[5, 128]).to_dtype(DType::BF16).unwrap();
    let y = layer.forward(&x).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
    assert_eq!(bits(&y), bits(&stock(&x, &weight).to_dtype(DType::BF16).unwrap()));
}

#[test]
fn inputs_of_any_rank_and_stride() {
    let weight = weights(64, 128);
    let bias = inputs(&[64]);
    let layer = UnweightLinear::of_weight(&weight, Some(bias.clone())).unwrap();
    let x = inputs(&[2, 3, 128]);
    let expected = stock(&x.reshape((6, 128)).unwrap(), &weight).broadcast_add(&bias).unwrap();
    let y = layer.forward(&x).unwrap();
    assert_eq!(y.dims(), [2, 3, 64]);
    assert_eq!(bits(&y), bits(&expected));
    let strided = inputs(&[128, 6]).t().unwrap();
    assert!(!strided.is_contiguous());
    let expected = stock(&strided.contiguous().unwrap(), &weight).broadcast_add(&bias).unwrap();
    assert_eq!(bits(&layer.forward(&strided).unwrap()), bits(&expected));
    // A contiguous view with an offset.
    let part = inputs(&[9, 128]).narrow(0, 4, 3).unwrap();
    let expected = stock(&part, &weight).broadcast_add(&bias).unwrap();
    assert_eq!(bits(&layer.forward(&part).unwrap()), bits(&expected));
    assert_eq!(layer.forward(&inputs(&[0, 128])).unwrap().dims(), [0, 64]);
}

fn bundle(home: &Path, profile: Profile, weight: &Tensor) -> Bundle {
    let model = home.join("model");
    std::fs::create_dir_all(&model).unwrap();
    let tensors = HashMap::from([("up.weight", weight.clone()), ("norm.weight", inputs(&[128]))]);
    candle_core::safetensors::save(&tensors, model.join("model.safetensors")).unwrap();
    let output = home.join(profile.to_string());
    compress(&model, &output, &CompressOptions::new(profile), &Silent).unwrap();
    Bundle::open_weights(&output).unwrap()
}

#[test]
fn bundles_of_any_profile() {
    let home = tempfile::tempdir().unwrap();
    let (weight, x) = (weights(192, 128), inputs(&[4, 128]));
    for profile in [Profile::Packed, Profile::Distribution, Profile::Palette, Profile::Compact, Profile::Archive] {
        let bundle = bundle(home.path(), profile, &weight);
        let layer = UnweightLinear::of_bundle(&bundle, "up.weight", None, &CPU).unwrap();
        assert_eq!(bits(&layer.forward(&x).unwrap()), bits(&stock(&x, &weight)), "{profile}");
        let missing = UnweightLinear::of_bundle(&bundle, "down.weight", None, &CPU).err().unwrap();
        assert!(matches!(missing, Error::Bundle(_)), "{missing}");
        let vector = UnweightLinear::of_bundle(&bundle, "norm.weight", None, &CPU).err().unwrap();
        assert_eq!(vector.to_string(), "weight 'norm.weight' is F32 [128]; only BF16 matrices are packed");
    }
}

#[test]
fn invalid_layers_and_inputs_are_explained() {
    let layer_error = |weight: &Tensor, bias| UnweightLinear::of_weight(weight, bias).err().unwrap().to_string();
    assert!(
        layer_error(&weights(65, 64), None)
            .contains("cannot be packed (rows or columns are not a multiple of 64); use candle_nn::Linear")
    );
    assert!(layer_error(&inputs(&[64, 64]), None).contains("is f32 [64, 64]; only BF16 matrices"));
    assert!(layer_error(&weights(64, 64), Some(inputs(&[65]))).contains("is [65], but the weight has 64 rows"));
    let layer = UnweightLinear::of_weight(&weights(64, 64), None).unwrap();
    let forward_error = |x: &Tensor| layer.forward(x).err().unwrap().to_string();
    assert!(forward_error(&inputs(&[2, 65])).contains("the weight is [64, 64], but the input has 65 columns"));
    assert!(forward_error(&inputs(&[2, 64]).to_dtype(DType::F16).unwrap()).contains("neither F32 nor BF16"));
    let x = Var::from_tensor(&inputs(&[2, 64])).unwrap();
    let backward = layer.forward(&x).unwrap().sum_all().unwrap().backward().err().unwrap();
    assert!(backward.to_string().contains("unweight-linear"), "{backward}");
}
