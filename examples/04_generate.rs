//! Generates text from a bundle:
//!
//! ```text
//! cargo run --release --features full --example 04_generate -- BUNDLE "Once upon a time"
//! ```
//!
//! Needs an NVIDIA GPU with its driver, and libnvrtc on the first run. Tested on Hopper; Ampere, Ada and Blackwell are
//! untested.

use std::{
    error::Error,
    io::{Write, stdout},
    path::Path,
};

use unweight::{
    engine::{Engine, EngineOptions, Finish, Request, SampleParams},
    format::bundle::Bundle,
    rt::{Device, KernelSet, env::Env},
    text::{self, Text},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, prompt] = arguments.as_slice() else {
        return Err("usage: 04_generate BUNDLE PROMPT".into());
    };
    let bundle = Bundle::open(Path::new(dir))?;
    let file = |name| bundle.copied(name, 64 << 20);
    let tokenizer = file(text::TOKENIZER)?.ok_or("the bundle has no tokenizer.json")?;
    let text = Text::new(&tokenizer, file(text::TOKENIZER_CONFIG)?.as_deref(), file(text::CHAT_TEMPLATE)?.as_deref())?;

    // The first run compiles the kernels; later runs load them from the cache. The weights take 12 bits each on the
    // GPU.
    let kernels = KernelSet::open(&Device::open(0)?, Env::process()?);
    let mut engine = Engine::load(&kernels, &bundle, EngineOptions::default().max_batch(1), &|_| {})?;
    eprintln!("{}", engine.memory());

    let params = SampleParams::default().temperature(0.7).top_p(0.9).seed(1);
    let request = Request::new(text.encode(prompt)?).params(params).max_new_tokens(128);
    engine.add(request.stop(engine.config().eos.clone()))?;
    let mut stream = text.stream();
    while !engine.is_idle() {
        for event in engine.step()? {
            if event.finish != Some(Finish::Stop) {
                print!("{}", stream.push(event.token)?);
                stdout().flush()?;
            }
        }
    }
    println!("{}", stream.finish()?);
    Ok(())
}
