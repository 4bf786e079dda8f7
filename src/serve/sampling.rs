//! Parses the fields for sampling, stop tokens and log probabilities.

use serde_json::Value;
use unweight_engine::{Adjustments, SampleParams};

use super::{error::ApiError, fields::Fields, frame::Endpoint};

/// The maximum number of top log probabilities of a completion, and of a conversation.
const COMPLETION_LOGPROBS_MAX: u64 = 5;
const CHAT_LOGPROBS_MAX: u64 = 20;
/// The maximum length of `stop_token_ids`.
const STOP_TOKENS_MAX: usize = 256;

/// The fields that this module reads.
pub(super) const FIELDS: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
];

/// The sampling options of a request.
#[derive(Debug)]
pub(super) struct Sampling {
    /// The parameters, without the seed.
    pub params: SampleParams,
    pub seed: Option<u64>,
    pub adjustments: Adjustments,
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
    /// The number of top log probabilities, as in [`unweight_engine::Request::logprobs`].
    pub logprobs: Option<u32>,
}

impl Sampling {
    /// Reads the fields.
    pub fn read(fields: &mut Fields, endpoint: Endpoint) -> Result<Self, ApiError> {
        let defaults = SampleParams::default().temperature(1.0);
        let params = defaults
            .temperature(fields.number("temperature")?.unwrap_or(defaults.temperature))
            .top_p(fields.number("top_p")?.unwrap_or(defaults.top_p))
            .top_k(top_k(fields)?)
            .min_p(fields.number("min_p")?.unwrap_or(defaults.min_p));
        params.check().map_err(|error| ApiError::of(error.name, error))?;
        let none = Adjustments::default();
        let min_tokens = fields.integer("min_tokens", 0, u32::MAX.into())?.unwrap_or(0);
        let adjustments = Adjustments::default()
            .bias(logit_bias(fields.value("logit_bias")?)?)
            .repetition_penalty(fields.number("repetition_penalty")?.unwrap_or(none.repetition_penalty))
            .frequency_penalty(fields.number("frequency_penalty")?.unwrap_or(none.frequency_penalty))
            .presence_penalty(fields.number("presence_penalty")?.unwrap_or(none.presence_penalty))
            .min_new_tokens(min_tokens as u32);
        adjustments.check().map_err(|error| ApiError::of(error.name, error))?;
        Ok(Self {
            params,
            seed: seed(fields)?,
            adjustments,
            ignore_eos: fields.flag("ignore_eos")?,
            stop_token_ids: stop_token_ids(fields.value("stop_token_ids")?)?,
            logprobs: logprobs(fields, endpoint)?,
        })
    }

    /// Checks that token ids are in the model's vocabulary.
    pub fn check(&self, vocab: u32) -> Result<(), ApiError> {
        self.adjustments.check_bias(vocab).map_err(|error| ApiError::of("logit_bias", error))?;
        match self.stop_token_ids.iter().find(|token| **token >= vocab) {
            None => Ok(()),
            Some(token) => {
                Err(ApiError::of("stop_token_ids", format!("token {token} is not in the vocabulary of {vocab} tokens")))
            }
        }
    }

    /// Returns the tokens that end a text, given the model's end tokens.
    pub fn ends(&self, eos: &[u32]) -> Vec<u32> {
        let mut ends = if self.ignore_eos { Vec::new() } else { eos.to_vec() };
        ends.extend(&self.stop_token_ids);
        ends
    }
}

/// Parses `top_k`. Other servers accept -1 for all tokens.
fn top_k(fields: &mut Fields) -> Result<u32, ApiError> {
    let value = fields.value("top_k")?;
    if value.as_ref().is_some_and(|value| value.as_i64() == Some(-1)) {
        return Ok(0);
    }
    let max = u64::from(u32::MAX);
    let number = value.map(|value| value.as_u64().filter(|number| *number <= max));
    let number = number.map(|number| {
        number.ok_or_else(|| ApiError::of("top_k", format!("top_k is neither -1 nor a whole number from 0 to {max}")))
    });
    Ok(number.transpose()?.unwrap_or(0) as u32)
}

/// Parses any 64-bit integer, signed or unsigned.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.value("seed")? else { return Ok(None) };
    let bits = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    bits.map(Some).ok_or_else(|| ApiError::of("seed", "seed is not a 64-bit integer"))
}

/// Parses an object of token ids and biases.
fn logit_bias(value: Option<Value>) -> Result<Vec<(u32, f32)>, ApiError> {
    let wrong = |what: &str| ApiError::of("logit_bias", format!("logit_bias {what}"));
    let map = match value {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(_) => return Err(wrong("is not an object of token ids and numbers")),
    };
    let parse_bias = |(key, bias): (String, Value)| {
        // `parse` accepts a plus sign, too.
        let is_number = key.bytes().all(|byte| byte.is_ascii_digit());
        let token: Option<u32> = key.parse().ok().filter(|_| is_number);
        let token =
            token.ok_or_else(|| wrong(&format!("has the key '{}', which is not a token id", truncated(&key))))?;
        let bias = bias.as_f64().ok_or_else(|| wrong(&format!("of token {token} is not a number")))?;
        Ok((token, bias as f32))
    };
    map.into_iter().map(parse_bias).collect()
}

/// Returns the first characters of a client's text.
fn truncated(text: &str) -> String {
    text.chars().take(40).collect()
}

fn stop_token_ids(value: Option<Value>) -> Result<Vec<u32>, ApiError> {
    let wrong = || {
        let message = format!("stop_token_ids is not a list of up to {STOP_TOKENS_MAX} token ids");
        ApiError::of("stop_token_ids", message)
    };
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= STOP_TOKENS_MAX => list,
        Some(_) => return Err(wrong()),
    };
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok()).ok_or_else(wrong);
    list.iter().map(token).collect()
}

/// Parses a number for a completion, or a flag and a number for a conversation.
fn logprobs(fields: &mut Fields, endpoint: Endpoint) -> Result<Option<u32>, ApiError> {
    let top = |message: &str| ApiError::of("top_logprobs", message);
    match endpoint {
        Endpoint::Completions => {
            if fields.value("top_logprobs")?.is_some() {
                return Err(top("top_logprobs is a field of conversations; set logprobs to a number"));
            }
            // Some clients send false.
            if fields.is_false("logprobs") {
                return Ok(None);
            }
            Ok(fields.integer("logprobs", 0, COMPLETION_LOGPROBS_MAX)?.map(|number| number as u32))
        }
        Endpoint::Chat => {
            let enabled = fields.flag("logprobs")?;
            let number = fields.integer("top_logprobs", 0, CHAT_LOGPROBS_MAX)?.unwrap_or(0);
            if number > 0 && !enabled {
                return Err(top("top_logprobs needs logprobs; set logprobs to true"));
            }
            Ok(enabled.then_some(number as u32))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(endpoint: Endpoint, body: &Value) -> Result<Sampling, ApiError> {
        let body = body.to_string();
        let sampling = Sampling::read(&mut Fields::read(body.as_bytes(), FIELDS).unwrap(), endpoint)?;
        sampling.check(2000)?;
        Ok(sampling)
    }

    #[test]
    fn values_are_read() {
        let sampling = json!({ "logit_bias": { "5": -100, "7": 1.5 }, "frequency_penalty": -2, "presence_penalty": 0.5,
            "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": [4, 9], "logprobs": 5 });
        let sampling = read(Endpoint::Completions, &sampling).unwrap();
        assert_eq!(sampling.adjustments.bias, [(5, -100.0), (7, 1.5)]);
        let Adjustments { frequency_penalty, presence_penalty, repetition_penalty, min_new_tokens, .. } =
            sampling.adjustments;
        assert_eq!((frequency_penalty, presence_penalty, repetition_penalty, min_new_tokens), (-2.0, 0.5, 1.1, 3));
        assert_eq!((sampling.ends(&[2]), sampling.logprobs), (vec![2, 4, 9], Some(5)));
        let ignoring = read(Endpoint::Chat, &json!({ "ignore_eos": true, "logprobs": true })).unwrap();
        assert_eq!((ignoring.ends(&[2]), ignoring.logprobs), (vec![], Some(0)));
        let chat = read(Endpoint::Chat, &json!({ "logprobs": true, "top_logprobs": 20 })).unwrap();
        assert_eq!(chat.logprobs, Some(20));
        for none in [json!({}), json!({ "logprobs": null }), json!({ "logprobs": false, "logit_bias": {} })] {
            for endpoint in [Endpoint::Chat, Endpoint::Completions] {
                let sampling = read(endpoint, &none).unwrap();
                assert!(sampling.logprobs.is_none() && sampling.adjustments.is_none(), "{none}");
            }
        }
    }

    #[test]
    fn wrong_values_are_rejected_by_field() {
        let many = |count: u32| (0..count).map(|token| (token.to_string(), json!(1))).collect::<Value>();
        for (name, value) in [
            ("logit_bias", json!([1])),
            ("logit_bias", json!({ "x": 1 })),
            ("logit_bias", json!({ "+1": 1 })),
            ("logit_bias", json!({ "1.0": 1 })),
            ("logit_bias", json!({ "": 1 })),
            ("logit_bias", json!({ "4294967296": 1 })),
            ("logit_bias", json!({ "2000": 1 })),
            ("logit_bias", json!({ "1": 1, "01": 1 })),
            ("logit_bias", json!({ "1": "1" })),
            ("logit_bias", json!({ "1": null })),
            ("logit_bias", json!({ "1": 100.5 })),
            ("logit_bias", json!({ "1": -1e300 })),
            ("logit_bias", many(1025)),
            ("logit_bias", many(100_000)),
            ("frequency_penalty", json!(2.5)),
            ("frequency_penalty", json!("1")),
            ("presence_penalty", json!(-1e300)),
            ("repetition_penalty", json!(0)),
            ("repetition_penalty", json!(-1)),
            ("repetition_penalty", json!(1e39)),
            ("min_tokens", json!(-1)),
            ("min_tokens", json!(1.5)),
            ("ignore_eos", json!(1)),
            ("stop_token_ids", json!(5)),
            ("stop_token_ids", json!(["5"])),
            ("stop_token_ids", json!([2000])),
            ("stop_token_ids", json!(vec![1; 257])),
            ("logprobs", json!(6)),
            ("logprobs", json!(-1)),
            ("logprobs", json!("1")),
            ("logprobs", json!(true)),
            ("top_logprobs", json!(1)),
        ] {
            let error = read(Endpoint::Completions, &json!({ name: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name), "{error:?}");
            assert!(error.message.len() < 200, "{error:?}");
        }
        for (name, body) in [
            ("presence_penalty", r#"{"presence_penalty": 1e999}"#),
            ("logit_bias", r#"{"logit_bias": {"5": -1e999}}"#),
            ("stop_token_ids", r#"{"stop_token_ids": [1e3]}"#),
        ] {
            let mut fields = Fields::read(body.as_bytes(), FIELDS).unwrap();
            let error = Sampling::read(&mut fields, Endpoint::Chat).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name), "{error:?}");
        }
        for (name, body) in [
            ("logprobs", json!({ "logprobs": 1 })),
            ("top_logprobs", json!({ "top_logprobs": 1 })),
            ("top_logprobs", json!({ "logprobs": true, "top_logprobs": 21 })),
        ] {
            assert_eq!(read(Endpoint::Chat, &body).unwrap_err().param.as_deref(), Some(name), "{body}");
        }
        assert!(read(Endpoint::Completions, &json!({ "logit_bias": many(1024) })).is_ok());
    }
}
