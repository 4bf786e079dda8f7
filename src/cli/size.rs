//! Parsing of sizes such as `4G`.

/// Parses `4G`, `512M`, `1.5GiB`, `1048576`: units are powers of 1024.
pub fn parse(text: &str) -> Result<u64, String> {
    let expected =
        || format!("'{text}' is not a size; write a number with K, M, G or T for powers of 1024, such as 4G");
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.trim().to_ascii_uppercase();
    let unit = unit.strip_suffix("IB").or(unit.strip_suffix('B')).unwrap_or(&unit);
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(expected()),
    };
    let value: f64 = number.parse().map_err(|_| expected())?;
    let bytes = value * (1u64 << shift) as f64;
    // Above 2^53 a float cannot represent single bytes, and no machine has so many.
    if bytes >= 1.0 && bytes <= (1u64 << 53) as f64 { Ok(bytes as u64) } else { Err(expected()) }
}

/// The smallest GPU memory that is accepted, bytes.
#[cfg(feature = "gpu")]
const MEMORY_MIN: u64 = 1 << 20;

/// Parses a size of GPU memory. A value below 1 MiB is rejected, because its unit is probably missing.
#[cfg(feature = "gpu")]
pub fn memory(text: &str) -> Result<u64, String> {
    match parse(text)? {
        bytes if bytes < MEMORY_MIN => {
            Err(format!("'{text}' is {bytes} bytes, too little for a model; write a size such as 24G"))
        }
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::{memory, parse};

    #[test]
    fn sizes() {
        let good =
            [("4G", 4 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("7", 7), ("2kb", 2048), ("1 T", 1 << 40)];
        for (text, bytes) in good {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "-1G", "0", "4X", "1e3", "4GG", "99999999T", "1.2.3", "NaN"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(memory("24G"), Ok(24 << 30));
        assert_eq!(memory("1048576"), Ok(1 << 20));
        assert!(memory("24").unwrap_err().contains("24G"));
    }
}
