//! Runs the example as its documentation does, and compiles its kernel. Neither needs a GPU.

use std::{error::Error, process::Command};

use unweight::{
    codegen::spec::VariantSpec,
    rt::{
        env::Env,
        raw::jit::{
            compiler::{CompileRequest, Compiler, NvrtcCompiler},
            cubin,
        },
    },
};

#[test]
fn dispatch_chooses_the_variant_and_it_compiles() -> Result<(), Box<dyn Error>> {
    let output = Command::new(env!("CARGO_BIN_EXE_unweight-own-variant")).output()?;
    let (text, error) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    assert!(output.status.success(), "{text}{error}");
    // The output has `registered: [2048, 2048] at batch 16: NAME, N us by the model`, and a line for the shipped
    // variants before it.
    let chosen = |what: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(what)).unwrap_or_else(|| panic!("{what} {text}"));
        let name = line.rsplit(": ").next().and_then(|rest| rest.split(',').next());
        name.unwrap_or_else(|| panic!("{line}")).to_owned()
    };
    let (shipped, registered) = (chosen("H200, shipped: "), chosen("registered: "));
    assert_ne!(shipped, registered);
    assert_eq!(registered, "uw_sm90a_gemm_mma_b16_r1w16p4c1_esc_pdl_store");

    let request = CompileRequest::render(&registered.parse::<VariantSpec>()?)?;
    let compiled = NvrtcCompiler::new(Env::process()?).compile(&request).unwrap_or_else(|error| {
        panic!("{error}\nthis test needs NVRTC: run `cargo xtask test`, which fetches it, or set UNWEIGHT_NVRTC")
    });
    let kernels = cubin::read(&compiled.cubin)?;
    assert!(!kernels.kernel(&registered)?.spills(), "{registered} spills");
    Ok(())
}
