-- A prompt of 400 KB.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local system = string.rep("You are a helpful assistant. ", 14000)
wrk.body = '{"model":"m","messages":[{"role":"system","content":"' .. system .. '"},{"role":"user","content":"hi there"}],"stream":false}'
